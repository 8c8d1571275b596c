"""Events for the program that follows the run, and for trackers."""

from __future__ import annotations

from fedapp.errors import counted, first_of
from fedapp.federation.hook import Hook, Setup
from fedapp.federation.participants import Outcome, Progress
from fedapp.method import ServerState
from fedapp.results.directory import MOST_CURVES, TRACKED
from fedapp.transport.traffic import Exchange


class ProgressEvents(Hook):
    """Events of rounds, queries and scores."""

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Announce a round."""
        rounds = self.run.config.federation.num_server_rounds
        self.tell_clients(outcome.exchange)
        self.run.tell({"kind": "round", "rounds": rounds, **outcome.exchange.row})

    def after_query(self, exchange: Exchange) -> None:
        """Announce a query."""
        clients = len(exchange.metrics)
        self.run.tell({"kind": "asked", "what": exchange.kind, "clients": clients, "seconds": exchange.seconds})

    def after_evaluation(self, exchange: Exchange) -> None:
        """Announce an evaluation; name the clients whose fine-tuning gave no score."""
        if exchange.kind == "evaluate":
            self.run.tell({"kind": "evaluated", **exchange.row})
        elif exchange.kind == "final":
            if self.run.method.client.tunes() and self.run.scored:
                self.warn_of_tuning(exchange)
            self.tell_clients(exchange)

    def warn_of_tuning(self, exchange: Exchange) -> None:
        """Name the clients whose fine-tuning gave no score."""
        asked = sorted(exchange.metrics.keys() & self.run.scoring.finalists)
        without = [str(c) for c in asked if "tuned-total" not in exchange.metrics[c]]
        if without:
            self.run.warn(
                f"no score 'tuned' of {counted(len(without), 'client')} ({first_of(without)}): their fine-tuning loss "
                "is NaN; lower lr, or set clip"
            )

    def tell_clients(self, exchange: Exchange) -> None:
        """Send the clients' scores to trackers, which may be on another machine than the run directory."""
        if self.run.config.storage.track and self.run.scoring.clients <= MOST_CURVES:
            scores = {c: {k: v for k, v in row.items() if k.endswith(TRACKED)} for c, row in exchange.rows.items()}
            final = exchange.kind == "final"
            self.run.tell({"kind": "clients", "round": exchange.round, "final": final, "rows": scores})


class LostClients(Hook):
    """Names the clients without a further valid reply, but for those that are blocked.

    Attributes
    ----------
    lost : by client, its first invalid reply since its last valid one.
    """

    remembers = ("lost",)

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.lost: dict[int, str] = {}

    def after_query(self, exchange: Exchange) -> None:
        """Note the clients without a valid reply, and forget those with one."""
        for d in exchange.dropped:
            self.lost.setdefault(d.client, f"client {d.client} since round {d.round} ({d.stage}: {d.reason})")
        for client in exchange.metrics:
            self.lost.pop(client, None)

    after_evaluation = after_query

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Note the clients of a round."""
        self.after_query(outcome.exchange)

    def finish(self, at: Progress) -> None:
        """Warn of those that are still lost."""
        blocked = self.run.cohort.manager.offences.blocked
        if lost := [text for client, text in sorted(self.lost.items()) if client not in blocked]:
            self.run.warn(f"no valid reply for the rest of the run: {first_of(lost)}")


class RoundWarnings(Hook):
    """Remembers the warnings of the rounds for the summary; those from before the rounds belong to one process."""

    def __init__(self, run: Setup) -> None:
        super().__init__(run)
        self.earlier = len(run.warnings)

    def state_dict(self) -> ServerState:
        """Return the warnings of the rounds so far."""
        return {"texts": self.run.warnings[self.earlier :]}

    def load_state_dict(self, state: ServerState) -> None:
        """Put them before those of the rounds that follow."""
        self.run.warnings += state["texts"]


class FinalTrainingNotice(Hook):
    """Announces the training before the final scores."""

    def after_round(self, at: Progress, outcome: Outcome) -> None:
        """Announce it after the last round."""
        federation, scoring = self.run.config.federation, self.run.scoring
        if scoring.retrains and federation.fraction_train < 1 and at.round == federation.num_server_rounds:
            clients, chosen = scoring.clients, len(scoring.finalists)
            known = counted(clients, "client")
            some = f"all {known}" if chosen == clients else f"{chosen} of {known}"
            text = f"{some} {'train' if clients > 1 else 'trains'} again for their scores"
            self.run.tell({"kind": "waiting", "text": f"{text}; set final-training = false to skip this"})
