"""Settings that contradict each other, found without reading any data."""

from __future__ import annotations

import re
from typing import Any

from fedapp import plugins, sampling
from fedapp.config import dp_rules
from fedapp.config.keys import DEFAULTS, RunConfig
from fedapp.core.robust import OWN_RULE, RULES, needed, parsed
from fedapp.core.secure_sum import flaw, threshold
from fedapp.data import flower
from fedapp.data.datasets import OWN, check_name
from fedapp.data.names import roles
from fedapp.data.partitions import NATURAL, PARTITION_KINDS
from fedapp.errors import BadRequest, counted, suggest_choice
from fedapp.lazy import torch
from fedapp.learning import evaluation
from fedapp.learning.optimizers import parse_schedule, takes
from fedapp.learning.training import class_numbers, make_optimizer
from fedapp.method import BaseHParams, Method
from fedapp.models import ADAPTER, IDENTITY, MODEL_NAMES, check_form, frozen, is_own, own
from fedapp.settings import unless_auto
from fedapp.settings.evaluation import ALWAYS, CONFUSION, PROTOCOLS, share_of, whole_numbers
from fedapp.transport.traffic import needed_replies

OR_OWN = ", or name your own as package.module:function"
_BODY = re.compile(r"\A[0-9a-f]{8,64}\Z")
_FEDERATION = re.compile(r"\A[a-z0-9-]{1,64}\Z")


def check(config: RunConfig) -> None:
    """Refuse settings that contradict each other, without reading any data."""
    method, hparams = config.method_and_hparams()
    scores = config.evaluation
    if not scores.measured or not {*scores.measured} <= {*PROTOCOLS}:
        raise BadRequest(f"protocols = '{scores.protocols}': choose from {', '.join(PROTOCOLS)}")
    _check_metrics(config)
    _check_unseen(config)
    roles(config.data.columns)
    _check_model(config, method, hparams)
    federation, sent = config.storage.federation, method.up_prefixes(hparams)
    if federation and not federation.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadRequest(f"federation = '{federation}': use letters, digits, '-', '_' and '.' only")
    if config.robustness.clip_update and not sent:
        raise BadRequest(
            f"clip-update limits changes of model arrays, but {config.federation.method} sends none: leave it at 0"
        )
    _check_robust(config, method, hparams)
    _check_sums(config, method, hparams)
    _check_wire(config, hparams)
    _check_totals(config, hparams)
    dp_rules.check(config, method, hparams)
    _check_partition(config)
    _check_bodies(config, method, hparams)
    rounds, every = config.federation.num_server_rounds, scores.evaluate_every
    chooses = scores.select == "validation"
    least, clients = unless_auto(config.federation.min_clients, 0), config.data.clients
    if not rounds and getattr(hparams, "base", "") != "none":
        raise BadRequest(f"num-server-rounds = 0: {config.federation.method} trains in rounds, so give at least 1")
    if chooses and not config.data.validation:
        raise BadRequest("select = 'validation' needs validation rows: hold some out with --set validation=0.1")
    if chooses and "received" not in scores.measured:
        raise BadRequest(
            f"select = 'validation' chooses by received, but protocols = '{scores.protocols}': measure it too"
        )
    if chooses and every > rounds:
        raise BadRequest(
            f"select = 'validation' with evaluate-every = {every} evaluates none of {counted(rounds, 'round')}: lower "
            "evaluate-every"
        )
    if 0 < clients < least:
        raise BadRequest(f"min-clients = {least}, but clients = {clients}: lower min-clients")
    if config.storage.resume and not config.storage.out:
        raise BadRequest("resume needs out: give the run directory to continue")
    check_name(config.data.dataset)
    kind, kinds = config.data.partition, ("auto", *PARTITION_KINDS)
    if kind not in kinds and not flower.is_named(kind):
        raise BadRequest(f"unknown partition '{kind}'{suggest_choice(kind, kinds)}")


def _check_model(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    settings, names = config.model, config.model.names
    several = len(set(names)) if len(set(names)) > 1 else 0
    if not names:
        raise BadRequest("model is empty: give one architecture, several with commas between them, or auto")
    for name in names:
        if is_own(name):
            check_form(name, settings)
        elif name != "auto" and name not in MODEL_NAMES:
            known = (*MODEL_NAMES, *own.installed())
            raise BadRequest(
                plugins.problems("models", MODEL_NAMES).get(name)
                or f"unknown model '{name}'{suggest_choice(name, known, OR_OWN)}"
            )
    args = settings.model_args and settings.model != IDENTITY
    if any((args, settings.head, settings.width, own.side(settings))) and not any(map(is_own, names)):
        raise BadRequest(
            "model-args, head, width and input-size are for own models (package.module:function): leave them out"
        )
    told = config.privacy.dp != "none" or config.data.normalise not in ("auto", "none")
    if told and frozen.of(settings.model, settings).scaled:
        raise BadRequest(
            "model-args of identity standardise features by sums of all clients: leave out normalise and dp"
        )
    if settings.weights and several:
        raise BadRequest(f"weights are of one architecture, but model = '{settings.model}' names several: give one")
    if settings.freeze and not settings.weights:
        raise BadRequest("freeze keeps layers with stored weights as they are: give weights too, or leave it out")
    if IDENTITY in names and config.data.normalise == "client":
        raise BadRequest(
            "normalise = 'client' gives each client's features their own mean and deviation, which hides differences "
            "between classes: choose data, none or auto"
        )
    if several and not method.heterogeneous:
        raise BadRequest(
            f"{config.federation.method} needs one architecture, but model = '{settings.model}' names {several}: give "
            "one, or choose a method that allows several (fedapp methods)"
        )
    if several and "features." in method.shared_prefixes(hparams):
        raise BadRequest(
            f"{config.federation.method} with these method-args shares bodies, so all clients need one "
            "architecture: give one model, or change method-args"
        )


def _check_partition(config: RunConfig) -> None:
    data, kind = config.data, config.data.partition
    names = [n.strip() for n in data.class_names.split(",")]
    named = flower.is_named(kind)
    natural = kind in NATURAL or named
    if data.class_names and (not all(names) or len(set(names)) != len(names)):
        raise BadRequest(f"class-names = '{data.class_names}': give different names with commas between them")
    for key in changed(config, "alpha", "classes-per-client") if natural else ():
        raise BadRequest(
            f"{key} is for drawn partitions, and partition = '{kind}' is not one: "
            + (f"give {key.replace('-', '_')} in partition-args" if named else "leave it out")
        )
    if named:
        flower.arguments(kind, data.partition_args)
    if kind in NATURAL and data.split == "official":
        raise BadRequest(f"split = 'official' does not go with partition = '{kind}': use given or auto")
    if data.partition_args and not named:
        raise BadRequest(
            "partition-args is for partitioners of flwr-datasets: give one, such as partition = "
            "flwr:DirichletPartitioner"
        )
    if data.split == "given" and kind not in ("auto", *NATURAL):
        raise BadRequest("split = 'given' goes with partition = 'by-client': choose official, merged or holdout")
    if (kind == "file") != bool(data.partition_file):
        raise BadRequest("partition = 'file' and partition-file go together: give both, or neither")


def _check_bodies(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse `bodies` where layers on their features are shared, or a setting is for one body."""
    for body in (bodies := config.data.named_bodies):
        if not _BODY.match(body):
            raise BadRequest(f"bodies: '{body}' is not the first 8 or more digits of a body's SHA-256")
    models, alone = set(config.model.names), not method.up_prefixes(hparams) and not method.extra_up
    own_layers = method.heterogeneous and (alone or models == {ADAPTER})
    if bodies and not own_layers and not (config.bodies_apart and models == {IDENTITY}):
        raise BadRequest(
            f"bodies gives each body a head of one exchange, with model = {IDENTITY} and fed3r, lda, qda, fedncm or "
            f"fedcof: {_with_args(config)} shares layers or statistics of features; to share a head alone, set model = "
            f"{ADAPTER} and take lgfedavg, fedgh or fedclassavg"
        )
    if len({body[:8] for body in bodies}) < len(bodies):
        raise BadRequest("bodies: two begin with the same 8 digits, which name the files of their heads: give one")
    for key in changed(config, "dp", "model-args", "unseen") if bodies else ():
        raise BadRequest(f"{key} is for clients of one body: leave out bodies, or {key}")


def changed(config: RunConfig, *keys: str) -> list[str]:
    """Return which of these keys have another value than their default."""
    flat = config.to_flat()
    return [key for key in keys if flat[key] != DEFAULTS[key]]


def _check_robust(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    guards, settings = method.guarded_by(hparams), config.robustness
    who = _with_args(config)
    try:
        rules = parsed(settings.robust)
    except ValueError as e:
        raise BadRequest(f"robust = '{settings.robust}': {e}") from e
    cap = unless_auto(settings.count_cap, 0.0)
    if rules and not {"rules", OWN_RULE} & set(guards):
        raise BadRequest(
            f"{who} does not average replies, so robust does not apply: leave it out, or choose another method"
        )
    if rules and "rules" not in guards and rules != (OWN_RULE,):
        raise BadRequest(f"robust = '{settings.robust}': {who} has a rule of its own: use robust = 'own'")
    if rules == (OWN_RULE,) and OWN_RULE not in guards:
        raise BadRequest(f"robust = 'own': {who} has no rule of its own: choose from {', '.join(RULES)}")
    if not rules and settings.robust_f != DEFAULTS["robust-f"]:
        raise BadRequest(
            f"robust-f = {settings.robust_f} is the number of malicious clients for robust: choose a rule too"
        )
    if cap and "count-cap" not in guards and config.privacy.dp != "example":
        raise BadRequest(f"count-cap limits the weights of clients, and {who} has none: leave it out")
    if 0 != cap < 1:
        raise BadRequest(f"count-cap = {cap:g}: must be 0, or at least 1 times the median")


def _with_args(config: RunConfig) -> str:
    """Return the method's id, with its arguments where there are any."""
    args = config.federation.method_args
    return config.federation.method + (f" with method-args = '{args}'" if args else "")


def _check_sums(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse what needs the replies of single clients where the server sees only their sum."""
    if not config.secure.secure_sum:
        for key in changed(config, "secure-dropout", "secure-colluders"):
            raise BadRequest(f"{key} is for secure sums: set secure-sum = true too, or leave it out")
        return
    if method.sums(hparams) is None:
        raise BadRequest(
            f"secure-sum: {_with_args(config)} needs the reply of each client, and not only their sum: leave it out, "
            "or choose a method that averages (docs/secure-sums.md lists them)"
        )
    why = {
        "robust": "compares single replies",
        "max-abs": "looks at single values",
        "count-cap": "changes the weights of single replies",
    }
    for key in changed(config, *why):
        raise BadRequest(f"{key} {why[key]}, which secure-sum hides from the server: use one of the two")


def _check_totals(config: RunConfig, hparams: Any) -> None:
    """Refuse stored totals where one client's sums are hidden, have noise, or are of features of another scale."""
    if not getattr(hparams, "totals", ""):
        return
    why = {
        "secure-sum": "the difference between two totals is the sum of the clients that joined or left",
        "dp": "the noise of a client's second answer is not that of its first",
        "bodies": "they are of one body",
    }
    for key in changed(config, *why):
        raise BadRequest(f"totals: {why[key]}: leave {key} out")
    if hparams.base != "none" or hparams.min_count > 1:
        raise BadRequest("totals: sums are of all rows, and no features are trained: leave base and min_count out")
    for key, scaled in {
        "model-args": frozen.of(config.model.model, config.model).scaled,
        "normalise": config.data.normalise == "data",
    }.items():
        if scaled:
            raise BadRequest(f"totals: features would be standardised by this run's clients alone: leave {key} out")


def _check_wire(config: RunConfig, hparams: BaseHParams) -> None:
    """Refuse second moments in float32 where something else rounds them too, or hides their sum."""
    if getattr(hparams, "wire", "f64") == "f32":
        for key in changed(config, "secure-sum", "dp", "wire-dtype"):
            raise BadRequest(f"wire=f32 rounds each client's sums: leave {key} out, or take wire=f64")


def _check_unseen(config: RunConfig) -> None:
    longest = max(whole_numbers("adapt-epochs", config.evaluation.adapt_epochs))
    if longest > 10_000:
        raise BadRequest(f"adapt-epochs = '{config.evaluation.adapt_epochs}': {longest} epochs are more than 10000")
    if not config.evaluation.unseen:
        return
    share = share_of(config.evaluation.unseen)
    if not (all(part.strip() for part in config.evaluation.unseen.split(",")) if share is None else 0 < share < 1):
        raise BadRequest(
            f"unseen = '{config.evaluation.unseen}': give a share between 0 and 1, or ids or names with commas "
            "between them"
        )


def _check_metrics(config: RunConfig) -> None:
    known = (*ALWAYS, *evaluation.METRICS, CONFUSION)
    taken = {*known, "correct", "total", "validation", *(evaluation.column(m) for m in evaluation.METRICS)}
    for name in config.evaluation.further_metrics:
        module, _, function = name.partition(":")
        if not evaluation.is_own(name):
            if name not in known:
                raise BadRequest(f"metrics: unknown '{name}'{suggest_choice(name, known, OR_OWN)}")
        elif not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise BadRequest(f"metrics: '{name}' is not of the form package.module:function")
        elif function in taken:
            raise BadRequest(f"metrics: '{function}' is the name of another score: rename your function")
        else:
            taken.add(function)


def check_training(config: RunConfig) -> None:
    """Refuse an optimizer, a schedule or weights that are not valid, or that leave a setting without effect."""
    settings, name = config.training, config.training.optimizer
    steps = settings.lr_schedule_steps
    if settings.momentum and not takes(name, "momentum"):
        raise BadRequest(f"momentum is for SGD and RMSprop: leave it at auto with optimizer = '{name}'")
    if settings.weight_decay and not takes(name, "weight_decay"):
        raise BadRequest(f"{name} has no weight decay: leave weight-decay at auto, or choose another optimizer")
    if name == "rprop" and steps:
        raise BadRequest("rprop uses lr for the first step of a round only: leave out lr-schedule-steps")
    _ = config.rates  # a schedule that is not valid has none
    if settings.optimizer_args:
        make_optimizer([torch.nn.Parameter(torch.zeros(()))], settings)
    if steps:
        parse_schedule("lr-schedule-steps", steps)
    class_numbers(settings.class_weights)


def check_simulation(config: RunConfig) -> None:
    """Refuse settings for real nodes, and ask for the data and state folders that only real nodes state themselves.

    Raises
    ------
    BadRequest : a setting does not fit a simulation, or a folder is missing.
    """
    data, storage = config.data, config.storage
    if data.class_names:
        raise BadRequest(
            "class-names is for nodes with their own data (--engine deploy): leave it out, the data set has names"
        )
    takes = {"columns": ("csv", "parquet", "hf"), "image-size": ("folder", "hf"), "layout": ("folder",)}
    for key in changed(config, *takes):
        if data.dataset not in takes[key]:
            raise BadRequest(f"{key} is for dataset = {' or '.join(takes[key])}, not {data.dataset}: leave it out")
    if data.dataset in OWN and not data.data_dir:
        raise BadRequest(f"dataset = '{data.dataset}' needs data-dir: give the path of your data")
    for name in config.evaluation.further_metrics:
        evaluation.metric(name)
    if storage.warm_start and not storage.state_dir:
        raise BadRequest("warm-start needs state-dir (and federation): give those of the earlier run")


def check_node(config: RunConfig) -> None:
    """Refuse settings that a real node does not accept from a server.

    Raises
    ------
    BadRequest : the run names a function of its own, which the node would have to import, a file that it would have
        to read, or a federation whose name is not a valid folder name on every system.
    """
    federation = config.storage.federation
    if federation and not _FEDERATION.match(federation):
        raise BadRequest(
            f"federation = '{federation[:80]}': on real nodes it names a folder: give 1 to 64 small letters, digits or "
            "hyphens"
        )
    dp_rules.check_node(config)
    own = [m for m in config.evaluation.further_metrics if evaluation.is_own(m)]
    if config.data.partition_file:
        raise BadRequest("partition-file is for simulations, because a node reads no file that a server names")
    if config.evaluation.confusion:
        raise BadRequest(
            "metrics: 'confusion' is for simulations, because it shows the number of samples of each class"
        )
    if own:
        raise BadRequest(
            f"metrics: '{own[0]}' is for simulations, because a node imports no code that a server "
            f"names: choose from {', '.join((*ALWAYS, *evaluation.METRICS))}"
        )


def check_liars(config: RunConfig, clients: int, simulation: bool) -> None:
    """Refuse rules that do not hold for the least number of replies that a round may have.

    Parameters
    ----------
    clients : that take part in the training.

    Raises
    ------
    BadRequest : there may be fewer replies than the rules need; the message has the number.
    """
    config = config.resolved(simulation)
    guard, settings = config.robustness, config.federation
    asked = len(sampling.sample_clients(config.federation.seed, 1, range(clients), settings.fraction_train))
    least = needed_replies(settings.min_replies, asked)
    need = needed(guard.averages, guard.robust_f)
    if least < need:
        raise BadRequest(
            f"robust = '{guard.robust}' with robust-f = {guard.robust_f} needs {counted(need, 'reply')} in every "
            f"round, but a round asks {asked} of {counted(clients, 'client')} and may end with "
            f"{counted(least, 'reply')}: lower robust-f, or raise "
            + ("min-replies" if asked >= need else "clients or fraction-train")
        )


def check_sums(config: RunConfig, clients: int) -> None:
    """Refuse secure sums over so few clients that they would not hide a single one.

    Parameters
    ----------
    clients : that take part in the training.

    Raises
    ------
    BadRequest : a round asks too few clients for `secure-dropout` and `secure-colluders`.
    """
    if not config.secure.secure_sum:
        return
    asked = len(sampling.sample_clients(config.federation.seed, 1, range(clients), config.federation.fraction_train))
    problem = flaw(asked, threshold(asked, config.secure.secure_dropout), config.secure.secure_colluders)
    if problem:
        raise BadRequest(
            f"secure-sum with {counted(asked, 'client')} in a round: {problem}; raise clients or fraction-train, or "
            "lower secure-dropout or secure-colluders"
        )


def check_rates(config: RunConfig, earlier: RunConfig, done: int) -> None:
    """Refuse another number of rounds where it changes the learning rates of rounds that are done.

    Parameters
    ----------
    earlier : the configuration of the run that is continued.   done : its complete rounds.

    Raises
    ------
    BadRequest : says which number of rounds it was begun with.
    """
    if config.rates[:done] != earlier.rates[:done]:
        raise BadRequest(
            f"the learning rates of rounds 1 to {done} were made for "
            f"{counted(earlier.federation.num_server_rounds, 'round')}: resume "
            f"without --rounds, or start a new run (with the length in lr-schedule, such as T_max="
            f"{earlier.federation.num_server_rounds}, more rounds can follow)"
        )
