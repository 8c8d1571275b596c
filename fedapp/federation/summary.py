"""The statements of a run: memory and noise before it begins; at its end the stored final model and the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapp.config import dp_rules
from fedapp.core.secure_sum import threshold
from fedapp.federation import totals
from fedapp.federation.bodies import scores_by_body
from fedapp.federation.hook import Setup
from fedapp.federation.hooks.scores import ValidationChoice
from fedapp.federation.hooks.tables import Tables, protocols_of
from fedapp.federation.hooks.training import Checkpoint, PrivacySpent, published
from fedapp.learning.evaluation import LOW_IS_GOOD, column, measured
from fedapp.learning.metrics import mean
from fedapp.learning.state import write_safetensors
from fedapp.method import ServerState
from fedapp.results.directory import accuracy_summary
from fedapp.results.statistics import measured as measured_values
from fedapp.results.statistics import over_clients

MUCH = 1 << 30
"""Bytes of replies that a server holds without a warning."""


def memory_needed(run: Setup) -> str:
    """Warn if rules against malicious clients need much memory: they hold all replies, and their changes in float64."""
    sent = run.method.expected(run.hparams, run.infos[0].shapes).values()
    asked = math.ceil(len(run.infos) * run.config.federation.fraction_train)
    need = 12 * sum(math.prod(shape) for shape in sent) * asked
    rules = run.config.robustness.robust
    much = run.strategy.policy.robust.averages and need > MUCH
    return f"robust = '{rules}' holds all replies of a round: about {need / 2**30:.1f} GB here" if much else ""


def privacy_stated(run: Setup) -> str:
    """State the noise of the run before anything is trained; empty without `dp`."""
    config, clients = run.config, len(run.infos)
    if config.mechanism is None:
        return ""
    sent = run.method.expected(run.hparams, run.infos[0].shapes).values()
    drawn = max(1, math.floor(clients * config.federation.fraction_train + 0.5))
    asked = drawn if config.privacy.dp == "client" else clients
    secure = config.secure
    # The fewest clients of a sum, and those that may help the server.
    least = (threshold(asked, secure.secure_dropout), secure.secure_colluders) if secure.secure_sum else None
    size = sum(math.prod(shape) for shape in sent)
    exact = "; scores are exact, because this is a simulation: they are not covered" if run.scored else ""
    return dp_rules.stated(config.mechanism, size, asked, config.releases, least) + exact


def summary(run: Setup, state: ServerState) -> dict[str, Any]:
    """Return the summary of a finished run; `state` is the final one."""
    config, tables, manager = run.config, run.hooks.one(Tables), run.cohort.manager
    rounds, evaluations, final = (run.directory.table(f"{name}.csv") for name in ("rounds", "evaluations", "final"))
    chosen = run.hooks.one(ValidationChoice).chosen
    means = tables.final
    if run.central.wanted and (scores := run.central.score(state, bool(config.evaluation.further_metrics))):
        means = {**means, "global_accuracy": scores.accuracy, "global_balanced": scores.balanced}
    store_final(run, state, chosen)
    for body, part in run.parts.items():
        store_final(part, state[body], chosen, f"last-{body[:8]}")
    totals.store(run, state)
    tests = [int(v) for v in final.get("received_total", final.get("trained_total", [])) if not math.isnan(v)]
    none = np.empty(0)
    answered = rounds.get("clients", none)
    messaged = answered + rounds.get("dropped", none)
    clients = len(manager.infos.keys() - set(run.unseen))
    protocols = protocols_of(config, run.method, "final")
    named = tuple(p for p in (*config.evaluation.measured, "tuned") if p in ("global", *protocols))
    accuracy = accuracy_summary(rounds, evaluations, means, named, clients)
    last = int(rounds["round"].max()) if len(answered) else 0
    blocked = sorted(manager.offences.blocked)
    return {
        "ok": True,
        "method": config.federation.method,
        "dataset": config.data.dataset,
        "model": config.model.model,
        "clients": len(run.infos),
        **({"unseen": run.unseen} if run.unseen else {}),
        "rounds": last,
        "round": last if chosen is None else chosen,
        "seed": config.federation.seed,
        "accuracy": accuracy,
        "headline": headline(run, accuracy, last, chosen, clients),
        **run.scoring.stated(),
        "metrics": metrics(run),
        "pooled": {p: means.get(f"{p}_accuracy_pooled") for p in protocols},
        "test_sizes": {"min": min(tests, default=0), "mean": mean(map(float, tests)), "max": max(tests, default=0)},
        "bytes_up": whole(float((rounds.get("bytes_up", none) * answered).sum() / (answered.sum() or 1))),
        "bytes_down": whole(float((rounds.get("bytes_down", none) * messaged).sum() / (messaged.sum() or 1))),
        "dropped": run.directory.count("dropped.csv"),
        **({"blocked": blocked} if blocked else {}),
        **({"left_out": out} if (out := manager.left_out()) else {}),
        "stopped": run.hooks.stopped or None,
        "warnings": run.warnings,
        **{f"bytes_up_{kind}": whole(size) for kind, size in tables.bytes_up.items()},
        **run.strategy.report(state, tables.last_scores),
        **scores_by_body(run, state),
        **robustness(run, state),
        **privacy(run),
        "seconds": run.hooks.one(Checkpoint).seconds,
    }


def store_final(run: Setup, state: ServerState, chosen: int | None, name: str = "last") -> None:
    """Store the final model of the server, if it has one."""
    arrays = published(run.strategy, state)
    if arrays is not None:
        scalars = dict(run.strategy.send(state, 0, run.infos[0].client).scalars)
        header = {**run.header, "final": True, "scalars": scalars, **({} if chosen is None else {"round": chosen})}
        write_safetensors(run.directory.path / "models" / f"{name}.safetensors", arrays, header)


def metrics(run: Setup) -> dict[str, dict[str, dict[str, float]]]:
    """Return every metric of every score, with how it is spread over clients; `global` has one model and no spread."""
    further = run.config.evaluation.further_metrics
    names = {m: column(m) for m in ("accuracy", "loss", *further)}
    found = {
        p: {
            own: over_clients(table[f"{p}_{own}"], low_is_good=name in LOW_IS_GOOD)
            for name, own in names.items()
            if f"{p}_{own}" in table
        }
        for kind in ("final", "unseen")
        for table in (run.directory.table(f"{kind}.csv"),)
        for p in protocols_of(run.config, run.method, kind)
        if f"{p}_accuracy" in table
    }
    scores, data = run.central.last, run.central.data
    if scores is not None and data is not None:
        values = {"accuracy": scores.accuracy, "loss": scores.loss}
        values |= measured(further, data[1].cpu().numpy(), scores.probabilities)
        found["global"] = {name: {"mean": value} for name, value in values.items()}
    return found


def headline(
    run: Setup, accuracy: Mapping[str, Mapping[str, Any]], last: int, chosen: int | None, clients: int
) -> dict[str, Any] | None:
    """Return the one number that a method is judged by, over how many of all clients, and when it was measured."""
    protocol = next((p for p in run.method.headlines if p in accuracy), None)
    if protocol is None:
        return None
    final = run.directory.table("final.csv")
    moment = "the last round" if chosen is None else f"round {chosen}, chosen on validation rows"
    moment = moment if chosen or last else "one exchange"
    point = {
        "tuned": f"after {moment} and fine-tuning on the client",
        "trained": f"after {moment} and one more local training" if run.config.evaluation.final_training else
        "each client as it was last trained" + ("" if chosen is None else f", up to {moment}"),
        "received": f"after {moment}, before local training",
        "global": f"the global model after {moment}",
    }[protocol]  # fmt: skip
    server_round = last if chosen is None else chosen
    return {"score": protocol, "value": accuracy[protocol]["last"], "point": point, "round": server_round} | {
        "clients": len(measured_values(final.get(f"{protocol}_accuracy", final.get("client", ())))),
        "of": clients,
    }


def robustness(run: Setup, state: ServerState) -> dict[str, Any]:
    """Return measures against malicious clients, and rounds with too few senders for the rule; nothing by default."""
    robust = run.cohort.strategy.policy.robust
    if not robust.active:
        return {}
    found = {"rules": "+".join(robust.rules) or "none", "f": robust.robust_f, "count_cap": robust.count_cap}
    return {"robust": {**found, **state.get("robust", {})}}


def privacy(run: Setup) -> dict[str, Any]:
    """Return the run's statement about its clients' data; nothing without `dp`."""
    stated, spent, secure = run.config.mechanism, run.hooks.one(PrivacySpent), run.config.secure
    if stated is None:
        return {}
    found: dict[str, Any] = {"unit": stated.unit, "epsilon": spent.epsilon, "releases": spent.releases}
    found |= {"delta": stated.delta, "noise": stated.noise or None}
    if spent.unstated:  # a lost reply may have released as much as the budget allows
        found |= {"epsilon": max(spent.epsilon or 0.0, stated.epsilon), "unstated": len(spent.unstated)}
    if stated.sgd:  # without a noise each client has its own
        found |= {"mechanism": "DP-SGD", "clip": stated.bound}
    if secure.secure_sum:
        # The noise is on sums: epsilon holds as long as no more clients than these help the server.
        found |= {"noise-on": "sum", "colluders": secure.secure_colluders}
    if stated.test:
        found |= {"epsilon": None, "test": "test noise, no privacy"}
    return {"privacy": {**found, "scores": "exact, not covered" if run.scored else "none are sent"}}


def whole(value: float) -> float | int:
    """Return a whole number as an integer."""
    return int(value) if float(value).is_integer() else float(value)
