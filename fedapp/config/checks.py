"""Settings that contradict each other, found without reading any data."""

from __future__ import annotations

from fedapp import plugins
from fedapp.config.keys import DEFAULTS, PROTOCOLS, RunConfig, share_of, whole_numbers
from fedapp.core.robust import OWN_RULE, RULES, parsed
from fedapp.data import flower
from fedapp.data.columns import roles
from fedapp.data.datasets import check_name
from fedapp.data.partitions import NATURAL, PARTITION_KINDS
from fedapp.errors import BadRequest, counted, suggest
from fedapp.lazy import torch
from fedapp.learning import dp_rules, evaluation
from fedapp.learning.optimizers import parse_schedule, takes
from fedapp.learning.training import class_numbers, make_optimizer
from fedapp.method import BaseHParams, Method
from fedapp.models import MODEL_NAMES, ModelOptions, check_form, is_own, own


def check(config: RunConfig) -> None:
    """Refuse settings that contradict each other, without reading any data."""
    method, hparams = config.method_and_hparams()
    bad = [p for p in config.measured if p not in PROTOCOLS]
    if bad or not config.measured:
        raise BadRequest(f"protocols = '{config.protocols}': choose from {', '.join(PROTOCOLS)}")
    _check_metrics(config)
    _check_unseen(config)
    roles(config.columns)
    if not config.model_names:
        raise BadRequest("model is empty: give one architecture, several with commas between them, or auto")
    for name in config.model_names:
        if is_own(name):
            check_form(name, config.model_options)
        elif name != "auto" and name not in MODEL_NAMES:
            known = (*MODEL_NAMES, *own.installed())
            raise BadRequest(
                plugins.problems("models", MODEL_NAMES).get(name)
                or f"unknown model '{name}'{suggest(name, known)}: choose from {', '.join(known)}, or name your own as "
                "package.module:function"
            )
    stored = ModelOptions(weights=config.weights, freeze=config.freeze, unit=config.model_options.unit)
    if config.model_options != stored and not any(map(is_own, config.model_names)):
        raise BadRequest(
            "model-args, head, width and input-size are for own models (package.module:function): leave them out"
        )
    if config.weights and len(set(config.model_names)) > 1:
        raise BadRequest(f"weights are of one architecture, but model = '{config.model}' names several: give one")
    if config.freeze and not config.weights:
        raise BadRequest("freeze keeps layers with stored weights as they are: give weights too, or leave it out")
    if len(set(config.model_names)) > 1 and not method.heterogeneous:
        raise BadRequest(
            f"{config.method} needs one architecture, but model = '{config.model}' names "
            f"{len(set(config.model_names))}: give one, or choose a method that allows several (fedapp methods)"
        )
    if "features." in method.shared_prefixes(hparams) and len(set(config.model_names)) > 1:
        raise BadRequest(
            f"{config.method} with these method-args shares extractors, so all clients need one architecture: "
            "give one model, or change method-args"
        )
    if config.federation and not config.federation.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadRequest(f"federation = '{config.federation}': use letters, digits, '-', '_' and '.' only")
    if config.clip_update and not method.up_prefixes(hparams):
        raise BadRequest(f"clip-update limits changes of model arrays, but {config.method} sends none: leave it at 0")
    _check_robust(config, method, hparams)
    _check_sums(config, method, hparams)
    dp_rules.check(config, method, hparams, DEFAULTS)
    names = [n.strip() for n in config.class_names.split(",")]
    if config.class_names and (not all(names) or len(set(names)) != len(names)):
        raise BadRequest(f"class-names = '{config.class_names}': give different names with commas between them")
    named = flower.is_named(config.partition)
    if config.partition in NATURAL or named:
        changed = [k for k in ("alpha", "classes-per-client") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(
                f"{changed[0]} is for drawn partitions, and partition = '{config.partition}' is not one: "
                + (f"give {changed[0].replace('-', '_')} in partition-args" if named else "leave it out")
            )
        if not named and config.split == "official":
            raise BadRequest(f"split = 'official' does not go with partition = '{config.partition}': use given or auto")
    if named:
        flower.arguments(config.partition, config.partition_args)
    elif config.partition_args:
        raise BadRequest(
            "partition-args is for partitioners of flwr-datasets: give one, such as partition = "
            "flwr:DirichletPartitioner"
        )
    if config.split == "given" and config.partition not in ("auto", *NATURAL):
        raise BadRequest("split = 'given' goes with partition = 'by-client': choose official, merged or holdout")
    if (config.partition == "file") != bool(config.partition_file):
        raise BadRequest("partition = 'file' and partition-file go together: give both, or neither")
    if config.select == "validation":
        if not config.validation:
            raise BadRequest("select = 'validation' needs validation images: hold some out with --set validation=0.1")
        if "received" not in config.measured:
            raise BadRequest(
                f"select = 'validation' chooses by received, but protocols = '{config.protocols}': measure it too"
            )
        if config.evaluate_every > config.num_server_rounds:
            raise BadRequest(
                f"select = 'validation' with evaluate-every = {config.evaluate_every} evaluates none of "
                f"{counted(config.num_server_rounds, 'round')}: lower evaluate-every"
            )
    if config.min_clients != "auto" and 0 < config.clients < config.min_clients:
        raise BadRequest(f"min-clients = {config.min_clients}, but clients = {config.clients}: lower min-clients")
    if config.resume and not config.out:
        raise BadRequest("resume needs out: give the run directory to continue")
    check_name(config.dataset)
    kinds = ("auto", *PARTITION_KINDS)
    if config.partition not in kinds and not named:
        raise BadRequest(
            f"unknown partition '{config.partition}'{suggest(config.partition, kinds)}: choose from {', '.join(kinds)}"
        )


def _check_robust(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    guards = method.guarded_by(hparams)
    given = f" with method-args = '{config.method_args}'" if config.method_args else ""
    try:
        rules = parsed(config.robust)
    except ValueError as e:
        raise BadRequest(f"robust = '{config.robust}': {e}") from e
    if rules and not {"rules", OWN_RULE} & set(guards):
        raise BadRequest(
            f"robust is for averages of what clients send, and {config.method}{given} has none that it could guard: "
            "leave it out, or choose another method"
        )
    if rules and "rules" not in guards and rules != (OWN_RULE,):
        raise BadRequest(
            f"robust = '{config.robust}': {config.method}{given} has a rule of its own: use robust = 'own'"
        )
    if rules == (OWN_RULE,) and OWN_RULE not in guards:
        raise BadRequest(
            f"robust = 'own': {config.method}{given} has no rule of its own: choose from {', '.join(RULES)}"
        )
    if not rules and config.robust_f != DEFAULTS["robust-f"]:
        raise BadRequest(f"robust-f = {config.robust_f} says how many clients robust expects to lie: choose a rule too")
    if config.count_cap != "auto" and config.count_cap and "count-cap" not in guards and config.dp != "example":
        raise BadRequest(f"count-cap limits the weights of clients, and {config.method}{given} has none: leave it out")
    if config.count_cap != "auto" and 0 != config.count_cap < 1:
        raise BadRequest(f"count-cap = {config.count_cap:g}: must be 0, or at least 1 times the median")


def _check_sums(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse what needs the replies of single clients where the server sees only their sum."""
    if not config.secure_sum:
        changed = [k for k in ("secure-dropout", "secure-colluders") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(f"{changed[0]} is for secure sums: set secure-sum = true too, or leave it out")
        return
    given = f" with method-args = '{config.method_args}'" if config.method_args else ""
    if method.sums(hparams) is None:
        raise BadRequest(
            f"secure-sum: {config.method}{given} needs the reply of each client, and not only their sum: leave it out, "
            "or choose a method that averages (docs/secure-sums.md lists them)"
        )
    for key, why in (
        ("robust", "compares single replies"),
        ("max-abs", "looks at single values"),
        ("count-cap", "changes the weights of single replies"),
    ):
        if config.to_flat()[key] != DEFAULTS[key]:
            raise BadRequest(f"{key} {why}, which secure-sum hides from the server: use one of the two")


def _check_unseen(config: RunConfig) -> None:
    longest = max(whole_numbers("adapt-epochs", config.adapt_epochs))
    if longest > 10_000:
        raise BadRequest(f"adapt-epochs = '{config.adapt_epochs}': {longest} epochs are more than 10000")
    if not config.unseen:
        return
    share = share_of(config.unseen)
    if not (all(part.strip() for part in config.unseen.split(",")) if share is None else 0 < share < 1):
        raise BadRequest(
            f"unseen = '{config.unseen}': give a share between 0 and 1, or ids or names with commas between them"
        )


def _check_metrics(config: RunConfig) -> None:
    known = (*evaluation.ALWAYS, *evaluation.METRICS, evaluation.CONFUSION)
    taken = {*known, "correct", "total", "validation", *(evaluation.column(m) for m in evaluation.METRICS)}
    for name in config.further_metrics:
        module, _, function = name.partition(":")
        if not evaluation.is_own(name):
            if name not in known:
                raise BadRequest(
                    f"metrics: unknown '{name}'{suggest(name, known)}: choose from {', '.join(known)}, or name your "
                    "own as package.module:function"
                )
        elif not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise BadRequest(f"metrics: '{name}' is not of the form package.module:function")
        elif function in taken:
            raise BadRequest(f"metrics: '{function}' is the name of another score: rename your function")
        else:
            taken.add(function)


def check_training(config: RunConfig) -> None:
    """Refuse an optimizer, a schedule or weights that are not valid, or that leave a setting without effect."""
    name = config.optimizer
    if not takes(name, "momentum") and config.momentum:
        raise BadRequest(f"momentum is for SGD and RMSprop: leave it at auto with optimizer = '{name}'")
    if not takes(name, "weight_decay") and config.weight_decay:
        raise BadRequest(f"{name} has no weight decay: leave weight-decay at auto, or choose another optimizer")
    if name == "rprop" and config.lr_schedule_steps:
        raise BadRequest("rprop uses lr for the first step of a round only: leave out lr-schedule-steps")
    spec = config.train_spec()  # makes the rates of the rounds
    if config.optimizer_args:
        make_optimizer([torch.nn.Parameter(torch.zeros(()))], spec)
    if config.lr_schedule_steps:
        parse_schedule("lr-schedule-steps", config.lr_schedule_steps)
    class_numbers(config.class_weights)
