"""What a command imports before it does its work: a user waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedapp.engines.forks import Warm
from fedapp.engines.warm import GRACE
from tests.deployment import until
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


def test_the_stand_ins_give_way_to_pytorch_at_the_first_use() -> None:
    code, shown, _ = loaded(
        "import clients.fedgh as m, fedapp.lazy as lazy\n"
        "stood = m.torch\n"
        "assert 'torch' not in sys.modules and stood is lazy.torch\n"
        "assert stood.zeros(2).shape == (2,)\n"
        "import torch; assert m.torch is torch is lazy.torch, 'everywhere, and for modules that follow'\n"
        "assert isinstance(torch.zeros(1), m.Tensor) and m.Tensor is torch.Tensor\n"
        "class Net(lazy.nn.Module): pass\n"
        "assert issubclass(Net, torch.nn.Module)"
    )
    assert code == 0, shown


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


def test_the_command_that_waits_for_a_simulation_has_given_pytorch_back(tmp_path: Path) -> None:
    arguments = ["run", "--dataset", "digits", "--clients", "3", "--rounds", "1", "--out", str(tmp_path / "run")]
    code, shown, slow = loaded(
        "import fedapp.engines.superlink as superlink\n"
        "def begin(**settings): raise SystemExit(7)\n"
        "superlink.Session = begin\n"
        f"sys.argv = {['fedapp', *arguments]!r}; from fedapp.cli import main; main()"
    )
    assert (code, slow) == (7, "requests"), shown  # Flower's own client of the web
    assert "(measured on client" in shown and "training begins" in shown, shown


def test_what_a_process_of_its_own_does_stays_there() -> None:
    code, shown, _ = loaded(
        "import os\n"
        "from fedapp.engines.forks import Warm\n"
        "with Warm() as warm:\n"
        "    assert warm.call(os.getpid) not in (os.getpid(), warm.process.pid)\n"
        "    warm.call(eval, \"__import__('fedapp.models.zoo') and 1\")\n"
        "    assert 'torch' not in sys.modules and 'fedapp.models.zoo' not in sys.modules\n"
        "    import torch\n"
        "    assert warm.call(os.getpid) == os.getpid(), 'nothing to save'\n"
        "warm.process.wait(20)\n"
        "assert not warm.forks.folder.exists()"
    )
    assert code == 0, shown


def test_who_wants_no_forks_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_COLD", "1")
    with Warm() as warm:
        warm.start()
        environment = {"PATH": "bin"}
        assert warm.process is None and warm.entered(environment) == environment


@pytest.mark.parametrize(
    ("does", "raised"),
    [
        ("from_flat, {'method': 'fedavgg'}", "BadRequest fedavgg"),
        ("os._exit, 9", "BadRequest the process that tries data and model before the run was killed"),
        ("eval, '1 / 0'", "ZeroDivisionError in <module>"),
        ("eval, 'lambda: 0'", "pickle"),
        ('exec, \'raise UnicodeDecodeError(\\"utf-8\\", bytes(), 0, 1, \\"odd\\")\'', "UnicodeDecodeError"),
        ("exec, 'class E(Exception): pass\\nraise E()'", "RuntimeError Traceback"),
        ("exec, 'raise SystemExit(3)'", "SystemExit 3"),
    ],
)
def test_the_error_of_a_process_of_its_own_is_raised(does: str, raised: str) -> None:
    code, shown, _ = loaded(
        "import os\n"
        "from fedapp.config import from_flat\n"
        "from fedapp.engines.forks import Warm\n"
        "with Warm() as warm:\n"
        f"    try: warm.call({does})\n"
        "    except BaseException as e: print(type(e).__name__, e, *getattr(e, '__notes__', []))"
    )
    assert code == 0 and all(word in shown for word in raised.split(" ", 1)), shown


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a warm process needs Linux")
def test_a_process_of_its_own_ends_with_who_waits_for_it() -> None:
    program = "import time; from fedapp.engines.forks import Warm\nwith Warm() as warm: warm.call(time.sleep, 60)"
    waits = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        works: list[psutil.Process] = []

        def found() -> bool:
            warm = [child for child in psutil.Process(waits.pid).children() if child.name() == "warm.py"]
            works[:] = [fork for process in warm for fork in process.children()]
            return bool(works)

        until(found, 60, "the function is called")
    finally:
        waits.kill()
        waits.wait()
    until(lambda: not works[0].is_running(), 0.6 * GRACE, "the function has ended, before the warm process ends it")


def test_the_collector_does_not_look_through_pytorch() -> None:
    for program in ("from fedapp.lazy import torch; torch.zeros(1)", "import fedapp.client_app, fedapp.models.split"):
        code, shown, _ = loaded(f"import gc; {program}; print('frozen', gc.get_freeze_count(), gc.isenabled())")
        frozen, enabled = shown.partition("frozen")[2].split()[:2]
        assert code == 0 and int(frozen) > 100_000 and enabled == "True", shown
