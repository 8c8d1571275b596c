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
        raise BadRequest(f"protocols = '{config.evaluation.protocols}': choose from {', '.join(PROTOCOLS)}")
    _check_metrics(config)
    _check_unseen(config)
    roles(config.data.columns)
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
    stored = ModelOptions(weights=config.model.weights, freeze=config.model.freeze, unit=config.model_options.unit)
    if config.model_options != stored and not any(map(is_own, config.model_names)):
        raise BadRequest(
            "model-args, head, width and input-size are for own models (package.module:function): leave them out"
        )
    if config.model.weights and len(set(config.model_names)) > 1:
        raise BadRequest(f"weights are of one architecture, but model = '{config.model.model}' names several: give one")
    if config.model.freeze and not config.model.weights:
        raise BadRequest("freeze keeps layers with stored weights as they are: give weights too, or leave it out")
    if len(set(config.model_names)) > 1 and not method.heterogeneous:
        raise BadRequest(
            f"{config.federation.method} needs one architecture, but model = '{config.model.model}' names "
            f"{len(set(config.model_names))}: give one, or choose a method that allows several (fedapp methods)"
        )
    if "features." in method.shared_prefixes(hparams) and len(set(config.model_names)) > 1:
        raise BadRequest(
            f"{config.federation.method} with these method-args shares extractors, so all clients need one "
            "architecture: "
            "give one model, or change method-args"
        )
    if (
        config.storage.federation
        and not config.storage.federation.replace("-", "").replace("_", "").replace(".", "").isalnum()
    ):
        raise BadRequest(f"federation = '{config.storage.federation}': use letters, digits, '-', '_' and '.' only")
    if config.robustness.clip_update and not method.up_prefixes(hparams):
        raise BadRequest(
            f"clip-update limits changes of model arrays, but {config.federation.method} sends none: leave it at 0"
        )
    _check_robust(config, method, hparams)
    _check_sums(config, method, hparams)
    dp_rules.check(config, method, hparams, DEFAULTS)
    names = [n.strip() for n in config.data.class_names.split(",")]
    if config.data.class_names and (not all(names) or len(set(names)) != len(names)):
        raise BadRequest(f"class-names = '{config.data.class_names}': give different names with commas between them")
    named = flower.is_named(config.data.partition)
    if config.data.partition in NATURAL or named:
        changed = [k for k in ("alpha", "classes-per-client") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(
                f"{changed[0]} is for drawn partitions, and partition = '{config.data.partition}' is not one: "
                + (f"give {changed[0].replace('-', '_')} in partition-args" if named else "leave it out")
            )
        if not named and config.data.split == "official":
            raise BadRequest(
                f"split = 'official' does not go with partition = '{config.data.partition}': use given or auto"
            )
    if named:
        flower.arguments(config.data.partition, config.data.partition_args)
    elif config.data.partition_args:
        raise BadRequest(
            "partition-args is for partitioners of flwr-datasets: give one, such as partition = "
            "flwr:DirichletPartitioner"
        )
    if config.data.split == "given" and config.data.partition not in ("auto", *NATURAL):
        raise BadRequest("split = 'given' goes with partition = 'by-client': choose official, merged or holdout")
    if (config.data.partition == "file") != bool(config.data.partition_file):
        raise BadRequest("partition = 'file' and partition-file go together: give both, or neither")
    if config.evaluation.select == "validation":
        if not config.data.validation:
            raise BadRequest("select = 'validation' needs validation images: hold some out with --set validation=0.1")
        if "received" not in config.measured:
            raise BadRequest(
                f"select = 'validation' chooses by received, but protocols = '{config.evaluation.protocols}': measure "
                "it too"
            )
        if config.evaluation.evaluate_every > config.federation.num_server_rounds:
            raise BadRequest(
                f"select = 'validation' with evaluate-every = {config.evaluation.evaluate_every} evaluates none of "
                f"{counted(config.federation.num_server_rounds, 'round')}: lower evaluate-every"
            )
    if config.federation.min_clients != "auto" and 0 < config.data.clients < config.federation.min_clients:
        raise BadRequest(
            f"min-clients = {config.federation.min_clients}, but clients = {config.data.clients}: lower min-clients"
        )
    if config.storage.resume and not config.storage.out:
        raise BadRequest("resume needs out: give the run directory to continue")
    check_name(config.data.dataset)
    kinds = ("auto", *PARTITION_KINDS)
    if config.data.partition not in kinds and not named:
        raise BadRequest(
            f"unknown partition '{config.data.partition}'{suggest(config.data.partition, kinds)}: choose from "
            f"{', '.join(kinds)}"
        )


def _check_robust(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    guards = method.guarded_by(hparams)
    given = f" with method-args = '{config.federation.method_args}'" if config.federation.method_args else ""
    try:
        rules = parsed(config.robustness.robust)
    except ValueError as e:
        raise BadRequest(f"robust = '{config.robustness.robust}': {e}") from e
    if rules and not {"rules", OWN_RULE} & set(guards):
        raise BadRequest(
            f"robust is for averages of what clients send, and {config.federation.method}{given} has none that it "
            "could guard: "
            "leave it out, or choose another method"
        )
    if rules and "rules" not in guards and rules != (OWN_RULE,):
        raise BadRequest(
            f"robust = '{config.robustness.robust}': {config.federation.method}{given} has a rule of its own: use "
            "robust = 'own'"
        )
    if rules == (OWN_RULE,) and OWN_RULE not in guards:
        raise BadRequest(
            f"robust = 'own': {config.federation.method}{given} has no rule of its own: choose from {', '.join(RULES)}"
        )
    if not rules and config.robustness.robust_f != DEFAULTS["robust-f"]:
        raise BadRequest(
            f"robust-f = {config.robustness.robust_f} says how many clients robust expects to lie: choose a rule too"
        )
    if (
        config.robustness.count_cap != "auto"
        and config.robustness.count_cap
        and "count-cap" not in guards
        and config.privacy.dp != "example"
    ):
        raise BadRequest(
            f"count-cap limits the weights of clients, and {config.federation.method}{given} has none: leave it out"
        )
    if config.robustness.count_cap != "auto" and 0 != config.robustness.count_cap < 1:
        raise BadRequest(f"count-cap = {config.robustness.count_cap:g}: must be 0, or at least 1 times the median")


def _check_sums(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse what needs the replies of single clients where the server sees only their sum."""
    if not config.secure.secure_sum:
        changed = [k for k in ("secure-dropout", "secure-colluders") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(f"{changed[0]} is for secure sums: set secure-sum = true too, or leave it out")
        return
    given = f" with method-args = '{config.federation.method_args}'" if config.federation.method_args else ""
    if method.sums(hparams) is None:
        raise BadRequest(
            f"secure-sum: {config.federation.method}{given} needs the reply of each client, and not only their sum: "
            "leave it out, "
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
    name = config.training.optimizer
    if not takes(name, "momentum") and config.training.momentum:
        raise BadRequest(f"momentum is for SGD and RMSprop: leave it at auto with optimizer = '{name}'")
    if not takes(name, "weight_decay") and config.training.weight_decay:
        raise BadRequest(f"{name} has no weight decay: leave weight-decay at auto, or choose another optimizer")
    if name == "rprop" and config.training.lr_schedule_steps:
        raise BadRequest("rprop uses lr for the first step of a round only: leave out lr-schedule-steps")
    spec = config.train_spec()  # makes the rates of the rounds
    if config.training.optimizer_args:
        make_optimizer([torch.nn.Parameter(torch.zeros(()))], spec)
    if config.training.lr_schedule_steps:
        parse_schedule("lr-schedule-steps", config.training.lr_schedule_steps)
    class_numbers(config.training.class_weights)
