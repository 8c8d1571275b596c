"""Tables of rounds, clients, evaluations and dropped replies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedapp.config import RunConfig
from fedapp.core.averages import lower_median
from fedapp.federation.hook import Hook, Setup
from fedapp.federation.participants import Outcome, Progress
from fedapp.learning.evaluation import column
from fedapp.learning.metrics import client_row, mean, summarise
from fedapp.method import Method, Scored
from fedapp.results.directory import NAME
from fedapp.transport.traffic import Exchange


class Tables(Hook):
    """Writes the tables; the rows of a round and of an evaluation stay in `Exchange.row` and `rows` for other hooks.

    Attributes
    ----------
    bytes_up : bytes of one client's answer to a query, by kind of message.
    final, last_scores : means of the last scores, and the clients' numbers.
    """

    remembers = ("bytes_up",)

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.bytes_up: dict[str, float] = {}
        self.final: dict[str, float] = {}
        self.last_scores: Scored = {}

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Write the rows of a round; name the clients that began again, and a void round."""
        run, exchange = self.run, outcome.exchange
        protocols = protocols_of(run.config, run.method, "train")
        further = (*run.method.columns, *(("restarted",) if run.config.storage.lost_state == "restart" else ()))
        metrics, validation = exchange.metrics.items(), run.config.data.validation > 0
        exchange.rows = rows = {c: client_row(m, protocols, validation, further) for c, m in metrics}
        row: dict[str, Any] = {"round": at.round, "clients": len(rows)}
        row |= summarise(rows.values(), protocols, further, most=self.most())
        if run.central.wanted:
            scores = run.central.score(at.state)
            row["global_accuracy"] = scores.accuracy if scores else math.nan
            row["global_loss"] = scores.loss if scores else math.nan
        row["bytes_up"] = exchange.up / max(1, len(rows))
        row["bytes_down"] = exchange.down / max(1, len(exchange.messaged))
        row["dropped"] = len(exchange.dropped)
        row["void"] = int(bool(outcome.void))
        row["round_seconds"] = exchange.seconds
        row["train_seconds"] = mean(r["train_seconds"] for r in rows.values())
        exchange.row = row
        self.run.directory.append("rounds.csv", row)
        found = ({"round": at.round, **self.named(client), **columns} for client, columns in rows.items())
        self.run.directory.append("clients.csv", *found)
        self.run.directory.dropped(exchange.dropped)
        for client in (c for c, r in rows.items() if r.get("restarted") == 1):
            run.warn(f"client {client} started again in round {at.round}, because its stored state was lost")
        if outcome.void:
            run.warn(f"round {at.round} is void, the model stays as it was: {outcome.void}")

    def after_query(self, exchange: Exchange) -> None:
        """Note the size of an answer."""
        self.bytes_up[exchange.kind] = exchange.up / max(1, len(exchange.metrics))
        self.run.directory.dropped(exchange.dropped)

    def after_evaluation(self, exchange: Exchange) -> None:
        """Write `final.csv` or `unseen.csv` after the last round, else a row of `evaluations.csv`."""
        config, kind, directory = self.run.config, exchange.kind, self.run.directory
        protocols = protocols_of(config, self.run.method, kind)
        scores = [column(name) for name in config.evaluation.further_metrics]
        metrics, validation = exchange.metrics.items(), config.data.validation > 0
        exchange.rows = rows = {c: client_row(m, protocols, validation, scores=scores) for c, m in metrics}
        summary = summarise(rows.values(), protocols, scores=scores, most=self.most())
        # A resumed run repeats an evaluation that has no row, and its dropped replies.
        directory.dropped(exchange.dropped)
        if kind == "evaluate":
            exchange.row = {"round": exchange.round, "clients": len(rows), **summary}
            exchange.row["evaluate_seconds"] = exchange.seconds
            directory.append("evaluations.csv", exchange.row)
            return
        name = f"{kind}.csv"
        (directory.path / name).unlink(missing_ok=True)
        aside = ("train_loss", "steps", "bytes_up", "train_seconds")
        kept = ({k: v for k, v in columns.items() if k not in aside} for columns in rows.values())
        directory.append(name, *({**self.named(c), **columns} for c, columns in zip(rows, kept, strict=True)))
        if kind == "final":
            self.final, self.last_scores = summary, exchange.metrics
            directory.confusion(exchange.metrics, protocols)

    def most(self) -> float:
        """Return the largest number of test samples of a client that counts in pooled scores."""
        cap, facts = self.run.test_cap, self.run.cohort.manager.facts
        # Without a cap no client is counted: there may be very many.
        tests = [n for f in facts.values() if (n := int(f["test-examples"]))] if cap else []
        return cap * lower_median(tests) if tests else math.inf

    def named(self, client: int) -> Mapping[str, Any]:
        """Return the columns that say whose a row is: the number, and the name where the data have names."""
        return {"client": client, **({NAME: self.run.names[client]} if client < len(self.run.names) else {})}


def protocols_of(config: RunConfig, method: Method, kind: str) -> list[str]:
    """Return the scores of clients in an exchange; fine-tuned models are scored after the last round only."""
    tuned = ("tuned",) if method.client.tunes() else ()
    if kind == "unseen":
        adapted = [f"unseen_{score}@{n}" for n in config.evaluation.adaptations for score in ("trained", "local")]
        return ["unseen_received", *(f"unseen_{p}" for p in tuned), *adapted]
    if kind == "evaluate" and config.evaluation.select == "validation":
        return ["received"]
    trains = config.federation.num_server_rounds > 0
    measured = [p for p in config.evaluation.measured if p != "global" and (trains or p != "trained")]
    return [*measured, *(tuned if kind == "final" else ())]
