"""What a command imports before it does its work: a user waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house import ROOT

SLOW = ("torch", "torchvision", "ray", "pandas", "scipy", "sklearn", "matplotlib", "requests")
"""Libraries that tables of configuration, methods and hyperparameters do without."""


def loaded(program: str) -> tuple[int, str, str]:
    """Run a program in a process of its own; return its exit code, what it printed, and which of `SLOW` it loaded."""
    ends = f"import atexit, sys; atexit.register(lambda: print('loaded', *{{*{SLOW!r}}} & {{*sys.modules}}));"
    done = subprocess.run([sys.executable, "-c", ends + program], cwd=ROOT, capture_output=True, text=True)
    shown, _, names = done.stdout.rpartition("loaded")
    return done.returncode, shown + done.stderr, names.strip()


def command(*arguments: str) -> tuple[int, str, str]:
    """Run a command of fedapp."""
    return loaded(f"sys.argv = {['fedapp', *arguments]!r}; from fedapp.cli import main; main()")


def test_every_method_is_read_with_its_hyperparameters_without_pytorch() -> None:
    code, shown, slow = loaded(
        "from fedapp import config, registry\n"
        "for m in registry.discover().values(): config.from_flat({'method': m.id, 'lr': 0.1})\n"
        "print(len(registry.discover()), registry.broken())"
    )
    assert (code, slow) == (0, ""), shown
    assert "{}" in shown, "no file is broken"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("methods",), 0, "fedclassavg"),
        (("keys", "lr"), 0, "learning rate"),
        (("models",), 0, "resnet18"),
        (("recipes",), 0, "FedGH"),
        (("run", "--method", "fedavgg"), 2, "did you mean"),
        (("run", "--set", "optimizer=adamm", "--engine", "local"), 2, "adamw"),
        (("run", "--method", "fedprox", "--set", "method-args=mu=x"), 2, "mu"),
        (("run", "--resume", "nowhere"), 2, "nowhere"),
        (("compare", "--set", "modell=cnn"), 2, "did you mean"),
    ],
)
def test_a_command_that_trains_nothing_loads_no_pytorch(arguments: tuple[str, ...], code: int, words: str) -> None:
    found, shown, slow = command(*arguments)
    assert found == code and words in shown, shown
    assert slow == ""


def test_help_loads_no_tables() -> None:
    code, shown, _ = loaded("import fedapp.cli; print({'pydantic', 'tomllib', 'rich.progress'} & {*sys.modules})")
    assert code == 0 and "set()" in shown, shown


@pytest.mark.full
def test_the_stand_ins_give_way_to_pytorch_at_the_first_use() -> None:
    code, shown, _ = loaded(
        "import clients.fedgh as m, fedapp.lazy as lazy\n"
        "stood = m.torch\n"
        "assert 'torch' not in sys.modules and stood is lazy.torch\n"
        "assert isinstance(stood.__version__, str), 'which is the first use of it'\n"
        "assert stood.zeros(2).shape == (2,)\n"
        "import torch; assert m.torch is torch is lazy.torch, 'everywhere, and for modules that follow'\n"
        "assert isinstance(torch.zeros(1), m.Tensor) and m.Tensor is torch.Tensor\n"
        "class Net(lazy.nn.Module): pass\n"
        "assert issubclass(Net, torch.nn.Module)"
    )
    assert code == 0, shown


@pytest.mark.full
def test_no_run_loads_pandas() -> None:
    loaded("import fedapp; fedapp.data_card(dataset='digits', clients=3)")  # scikit-learn brings it, and is kept then
    code, shown, slow = loaded(
        "import tempfile\n"
        "from fedapp.engines.local import run\n"
        "small = dict(dataset='digits', clients=3, num_server_rounds=1, data_fraction=0.3)\n"
        "small['lr_schedule_steps'] = 'ConstantLR'\n"
        "for method in ('ccvr', 'fedclassavg'):\n"
        "    with tempfile.TemporaryDirectory() as out: run(method=method, out=out + '/run', **small)\n"
        "assert 'torch' in sys.modules"
    )
    assert code == 0, shown
    assert set(slow.split()) <= {"torch", "scipy"}, slow  # CCVR's statistics call SciPy's BLAS


@pytest.mark.full
def test_the_collector_does_not_look_through_pytorch() -> None:
    for program in ("from fedapp.lazy import torch; torch.zeros(1)", "import fedapp.client_app, fedapp.models.split"):
        code, shown, _ = loaded(f"import gc; {program}; print('frozen', gc.get_freeze_count(), gc.isenabled())")
        frozen, enabled = shown.partition("frozen")[2].split()[:2]
        assert code == 0 and int(frozen) > 100_000 and enabled == "True", shown
