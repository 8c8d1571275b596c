"""Events of a run as lines of text, for the terminal of `fedapp run` and for Flower's log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedapp.errors import counted
from fedapp.results.statistics import percent
from fedapp.settings.evaluation import PROTOCOLS


def line(event: Mapping[str, Any]) -> str | None:
    """Return what an event says to a person, or None where it says nothing; rounds are `round_line`'s."""
    kind = event.get("kind")
    if kind == "start":
        return resumed(event) if event.get("resume") else None
    if kind in ("waiting", "warning", "tracking", "joined"):
        return str(event["text"])
    if kind == "dropped":
        return f"round {event['round']}: client {event['client']} dropped in {event['stage']}: {event['reason']}"
    if kind == "blocked":
        return f"client {event['client']} is blocked for the rest of the run: {event['reason']}"
    if kind == "client-error":
        head = f"client {event['client']}, round {event['round']}, stage {event['stage']}:"
        return f"{head}\n{whose(event['client'], event['traceback'])}"
    return None


def failed(error: Mapping[str, Any]) -> str:
    """Return the reason of a failed run, from its `error.json`; a client's traceback was shown with its error."""
    client = error.get("client")
    where = f" (client {client}, round {error['round']}, {error['stage']})" if client is not None else ""
    shown = str(error.get("traceback") or "").rstrip() if client is None else ""
    keeps = ["error.json in the run directory keeps the traceback"] if error.get("traceback") else []
    return "\n".join([f"the run failed{where}: {error.get('message')}", *filter(None, [shown]), *keeps])


def whose(client: int, text: str) -> str:
    """Return a client's text with its number before each line: none can pass for a line of the run."""
    return "\n".join(f"client {client}: {line}" for line in text.splitlines())


def resumed(event: Mapping[str, Any]) -> str:
    """Describe a resumed run, from its event `start`."""
    done, rounds = int(event["done"]), int(event["rounds"])
    if done == 0:
        return f"no round was complete: begins again with round 1 of {rounds}"
    if done >= rounds:
        all_done = "the one round is done" if rounds == 1 else f"all {rounds} rounds are done"
        return f"{all_done}: only the scores after the last one are measured again"
    kept = "round 1 is kept as it is" if done == 1 else f"rounds 1 to {done} are kept as they are"
    return f"continues with round {done + 1} of {rounds} ({kept})"


def scores(event: Mapping[str, Any], clients: int) -> str:
    """Return the scores of a round as text.

    Parameters
    ----------
    event : `round`.   clients : that take part in the run; named are those that answered where they are fewer.
    """
    found = {protocol: event.get(f"{protocol}_accuracy") for protocol in PROTOCOLS}
    parts = [f"{name} {percent(score)} %" for name, score in found.items() if score is not None and score == score]
    text = ", ".join(parts)
    return f"{text} ({counted(event['clients'], 'client')})" if event["clients"] < clients else text


class Spoken:
    """Prints a run's events as lines, for Flower's log of a simulation that no one else follows."""

    def __init__(self, say: Any) -> None:
        self.say = say
        self.clients = 0
        self.out = ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Print one event."""
        kind = event.get("kind")
        if kind == "start":
            self.clients = int(event["clients"])
            size = f"{counted(self.clients, 'client')}, {counted(event['rounds'], 'round')}"
            self.say(f"{event['method']} on {event['dataset']}, {size}; results go to {event['out']}")
        if kind == "round":
            self.say(f"round {event['round']}/{event['rounds']}: {scores(event, self.clients)}")
        elif kind == "end":
            self.say(self._end(event["summary"]))
        elif kind == "failed":
            self.say(f"the run failed: {event['message']}")
        elif text := line(event):
            self.say(text)
        if kind == "directory":
            self.out = event["out"]

    def _end(self, summary: Mapping[str, Any]) -> str:
        headline = summary.get("headline")
        value = float(headline["value"]) if headline and headline["value"] is not None else math.nan
        said = f"{headline['score']} {percent(value)} %, {headline['point']}; " if headline and value == value else ""
        return f"{said}results: {self.out}"
