"""The answer of a comparison: sentences, alerts and one screen, made from its CSV files alone.

The terminal and the page show the same sentences. A difference has a word only where the interval of its table gives it
one; with one or two seeds there are no words (`results.intervals`).
"""

from __future__ import annotations

import math
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedapp import registry
from fedapp.errors import BadRequest, counted
from fedapp.lazy import pd
from fedapp.results import intervals
from fedapp.results.directory import short_path
from fedapp.results.runs import NO_TESTS, Comparison, RunResult, tells_of
from fedapp.results.statistics import DASH, mean_and_std, percent, size, tally

SETTING = ["dataset", "partition", "alpha", "classes_per_client", "sweep"]
"""Columns that tell the settings of a comparison apart."""
HARM = ["gain", "same", "lose"]
"""Numbers of clients that gain, score the same and lose against training alone."""
ALONE, AGAIN, GUESS = "alone", "alone again", "majority class"
"""Further rows of the screen, below the methods of the call."""
AGAIN_TITLE = "Standalone again"
"""Row of Standalone's second runs in a table of harm."""
LINES, METHODS, ALERTS, SENTENCES = 23, 8, 3, 6
"""Most lines of the screen (a prompt has the 24th of a terminal), rows of methods, lines of alerts and of sentences."""
QUESTIONS = ("difference", "harm", "cost")
"""Sentences that the screen has in any case."""
FEW_ROWS = 50
"""With fewer test rows of the median client, an alert states the weight of one row."""


# ---- one setting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer of a comparison for one setting.

    Attributes
    ----------
    table : its rows of results.csv, those of failed runs too.   again : its rows of again.csv.
    differences : its rows of significance.csv.   asked : the label of the reference, where notes.json has it.
    """

    table: pd.DataFrame
    again: pd.DataFrame
    differences: pd.DataFrame
    asked: Sequence[str] = ()

    @cached_property
    def finished(self) -> pd.DataFrame:
        """The rows of runs that have finished."""
        return self.table[self.table["failed"] == ""]

    @cached_property
    def tests(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By measure and method the row of significance.csv; below three seeds it has no word."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in self.differences.to_dict("records"):
            by = found.setdefault(row["measure"], {})
            by[row["variant"]] = {**row, "word": row["word"] if row["seeds"] > 2 else ""}
        return found

    @cached_property
    def reference(self) -> str:
        """Label of the method that the others are compared with."""
        known = self.differences["reference"] if len(self.differences) else ()
        lost = self.table.loc[self.table["method"] == "local", "variant"]  # of earlier versions
        return str(next(iter([*known, *self.asked, *lost, *self.table["variant"]])))

    @cached_property
    def alone(self) -> str:
        """Label of training alone; empty where no such run has finished."""
        return next(iter(self.finished.loc[self.finished["method"] == "local", "variant"]), "")

    @cached_property
    def called(self) -> list[str]:
        """Labels of all methods, those that failed too, without training alone, in the order of the call."""
        return [v for v in dict.fromkeys(self.table["variant"]) if v != self.alone]

    @cached_property
    def methods(self) -> list[str]:
        """Labels of the methods with a finished run, without training alone, in the order of the call."""
        return [v for v in self.called if v in set(self.finished["variant"])]

    def tells_of(self, run: RunResult) -> bool:
        """Return whether a run has the setting of this answer."""
        return all(tells_of(run, column, self.table[column].iloc[0]) for column in SETTING)

    @cached_property
    def delivered(self) -> set[str]:
        """The methods judged by the delivered model, before local training."""
        judged = self.finished.groupby("variant")["headline"].unique()
        return {v for v in self.methods if list(judged[v]) == ["received"]}

    def after_training(self) -> str:
        """Explain the scores of delivered models; name the method that is better after local training."""
        tests = self.tests.get("trained_accuracy", {})
        words = {v: [str((self.test(v, m) or {"word": ""})["word"]) for m in ("headline", "trained_accuracy")]
                 for v in self.delivered}  # fmt: skip
        better = [v for v, (now, then) in words.items() if then.startswith("better") > now.startswith("better")]
        most = max(better, key=lambda v: float(tests[v]["mean_difference"]), default="")
        if not most:
            return "as delivered; others after local training or fine-tuning"
        gain = f"{intervals.points(tests[most]['mean_difference'])} ({intervals.interval_text(tests[most])})"
        trained = percent(self.mean(most, "trained_last"))
        return f"as delivered; after local training {self.name(most)} has {trained}, {gain}"

    @property
    def majority(self) -> float:
        """The score of guessing each client's majority class; each seed counts once, however many methods finished."""
        return float(self.finished.groupby("seed")["majority"].first().mean())

    @property
    def seeds(self) -> int:
        """The most seeds of a method that is compared with the reference; one that lost some has no interval alone."""
        return int(max((row["seeds"] for row in self.tests.get("headline", {}).values()), default=0))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return int(self.table["clients"].max())

    def mean(self, label: str, column: str) -> float:
        """Return the mean over seeds of a column of results.csv; NaN where it was not measured."""
        return mean_and_std(self.finished.loc[self.finished["variant"] == label, column])[0]

    def harm(self, label: str) -> list[float]:
        """Return how many clients gain, score the same and lose, means over seeds."""
        return [self.mean(label, column) for column in HARM]

    def test(self, label: str, measure: str = "headline") -> dict[str, Any] | None:
        """Return the row of significance.csv of a method; None for the reference."""
        return self.tests.get(measure, {}).get(label)

    def name(self, label: str) -> str:
        """Return the name of a method in a sentence."""
        return "training alone" if label in (self.alone, "local") else registry.title_of(label)

    @cached_property
    def leader(self) -> str:
        """The method with the highest mean of those above the reference, else of all; empty without a method."""
        above = [v for v in self.methods if (t := self.test(v)) and str(t["word"]).startswith("better")]
        return max(above or self.methods, key=lambda v: ((s := self.mean(v, "headline_last")) == s, s), default="")

    @property
    def test_data(self) -> str:
        """The test data of the headlines: `central` where all are of global models, else the clients' `own`."""
        return "central" if set(self.finished["headline"].dropna()) == {"global"} else "own"

    # ---- sentences

    def sentences(self, shorter: int = 0) -> dict[str, str]:
        """Answer each question in a sentence: better by how much, for whom, for all classes, at what cost.

        Parameters
        ----------
        shorter : 1 names one method a group; 2 names the methods of no group but the first, and no variant.
        """
        if not self.leader:
            return {}
        found = {
            "difference": self._difference(shorter), "harm": self._harm(shorter),
            "classes": self._highest("all_classes", "on all classes", shorter), "cost": self._cost(shorter),
            "worst tenth": self._worst_tenth(),
        }  # fmt: skip
        return {question: sentence for question, sentence in found.items() if sentence}

    def _short(self, label: str, shorter: int) -> str:
        """Return the name of a method, in the shortest sentences without the values of its variant if one has it."""
        name = self.name(label)
        short, others = name.partition(" (")[0], [self.name(v) for v in self.called if v != label]
        return short if shorter > 1 and short not in {other.partition(" (")[0] for other in others} else name

    def _difference(self, shorter: int) -> str:
        highest = self._highest("headline_last", f"mean on {self.test_data} test data", shorter)
        if self.seeds < 3 or "headline" not in self.tests:
            return highest
        groups: dict[str, list[str]] = {}
        rows = sorted(self.tests["headline"].items(), key=lambda item: -abs(item[1]["mean_difference"]))
        for label, row in rows:
            if not row["word"]:  # fewer than three seeds in common
                continue
            side, _, how = str(row["word"]).partition(" ")
            less = f"; less than the margin of {intervals.size_of(row['margin'])}" * ("less" in how)
            by = f" by {100 * abs(row['mean_difference']):.1f} points ({intervals.interval_text(row)}{less})"
            side = side.rstrip(",")
            groups.setdefault(side, []).append(self._short(label, shorter) + by * (side in ("better", "worse")))
        reference = self.name(self.reference)
        margin = f"{intervals.size_of(rows[0][1]['margin'])} points" if rows else ""
        heads = {
            "better": f"Better than {reference}", "worse": f"Worse than {reference}",
            "equal": f"Equal to {reference} within {margin} (90 % intervals)", "open": "Not decided",
        }  # fmt: skip
        sides = [side for side in heads if side in groups]
        most = {side: 0 if shorter > 1 and side != sides[0] else 2 - min(shorter, 1) for side in sides}
        parts = [f"{heads[side]}: {_listed(groups[side], most[side])}." for side in sides]
        if set(groups) == {"open"}:
            return f"No difference to {reference} is decided. {highest}"
        return " ".join(parts if "better" in groups or shorter > 1 else [*parts, highest])

    def _highest(self, column: str, what: str, shorter: int) -> str:
        """Name the method with the highest mean, or all whose mean is printed as the same number."""
        means = {v: self.mean(v, column) for v in [*self.methods, *filter(None, [self.alone])]}
        known = {v: mean for v, mean in means.items() if not math.isnan(mean)}
        if not known:
            return ""
        shown = percent(max(known.values()))
        names = [self._short(v, shorter) for v, mean in known.items() if percent(mean) == shown]
        against = f" (training alone {percent(known[self.alone])} %)" if self.alone in known else ""
        against = "" if self.name(self.alone) in names else against
        listed = _listed(names, 2 - min(shorter, 1))
        return f"Highest {what}: {listed}, {shown} %{' each' if len(names) > 1 else ''}{against}."

    def _harm(self, shorter: int) -> str:
        gain, same, lose = self.harm(self.leader)
        if math.isnan(gain):
            return ""
        clients = tally([[gain + same + lose]])
        clients += " client" if clients == "1" else " clients"
        against = "" if self.reference == self.alone else "Against training alone, "
        helps, harms = tally([[gain]]), tally([[lose]])
        text = f"{against}{self._short(self.leader, shorter)} helps {helps} of {clients} and harms {harms}"
        if len(self.again):
            by_chance = (tally(self.again[[column]].to_numpy()) for column in ("gain", "lose"))
            text += f"; by chance (training alone, run again) {' and '.join(by_chance)}"
        losing = {v: mean for v in self.methods if not math.isnan(mean := self.harm(v)[2])}
        most = max(losing, key=lambda v: losing[v])
        more = f" {self._short(most, shorter)} harms the most clients: {tally([[losing[most]]])}."
        more *= losing[most] > lose
        return f"{text}.{more}"

    def _worst_tenth(self) -> str:
        row = self.test(self.leader, "headline_worst_tenth")
        if row is None or row["seeds"] < 3:
            return ""
        text = f"Worst 10 % of the clients, against that of {self.name(self.reference)}: {self.name(self.leader)}"
        return f"{text} {intervals.in_words(row)}."

    def _cost(self, shorter: int) -> str:
        label, rounds = self.leader, self.mean(self.leader, "rounds")
        sent = f"{size(self.mean(label, 'bytes_up'))} {'a round' if rounds else 'once'}"
        hidden = "secure_sum" in self.table and self.mean(label, "secure_sum") > 0
        return f"A client of {self._short(label, shorter)} sends {sent}. {payload_of(label, rounds, hidden)}".rstrip()

    def power(self) -> str:
        """State the differences that so few seeds can show; empty without a method."""
        rows = list(self.tests.get("headline", {}).values())
        if not rows:
            return ""
        if self.seeds < 3 <= (asked := self.table["seed"].nunique()):
            return f"Only {counted(self.seeds, 'seed')} of {asked} finished with the reference and a method."
        spread = pd.Series([row["standard_error"] * math.sqrt(row["seeds"]) for row in rows], dtype=float).median()
        seconds = self.finished.groupby("variant")["run_seconds"].mean()
        reference = ALONE if self.reference == self.alone else self.name(self.reference)
        again = float(seconds.get(self.alone, 0.0))
        return intervals.power_text(self.seeds, len(rows), reference, spread, float(seconds.sum()), again)

    def variance(self) -> str:
        """State the share of training alone's variance that lies between partitions; empty for fewer than four.

        Training alone and its repeat are two training seeds on each partition.
        """
        first = self.finished[self.finished["variant"] == self.alone]
        if self.again.empty or first.empty:
            return ""
        both = (rows.groupby("partition_seed")["headline_last"].first() for rows in (first, self.again))
        scores = pd.concat(both, axis=1, join="inner").dropna().to_numpy()
        share, low, high = intervals.partition_share(scores)
        if math.isnan(share):
            return ""
        text = f"Between partitions lies {percent(share, 0)} % of the variance of training alone (95 % interval "
        return f"{text}{percent(low, 0)} to {percent(high, 0)} %, {len(scores)} partitions, 2 training seeds each)."

    # ---- alerts

    def alerts(self) -> Iterator[str]:
        """Yield the warnings that a reader needs before the numbers."""
        failed = self.table[self.table["failed"] != ""]
        for label, rows in failed.groupby("variant", sort=False):
            runs = int((self.table["variant"] == label).sum())
            yield f"{self.name(str(label))} failed ({len(rows)} of {counted(runs, 'seed')}): {rows['failed'].iloc[0]}"
        if self.methods and not self.tests.get("headline"):
            why = "and no method have finished a seed in common"
            scores = self.finished.loc[self.finished["variant"] == self.reference, "headline_last"]
            if len(scores) and scores.isna().all():
                why = f"has no score on {self.test_data} test data: give another --reference"
            yield f"No differences: {self.name(self.reference)} {why}."
        if self.clients == 1:
            yield "One client: there is nothing to federate."
        done = self.finished
        seeds = done.groupby("variant", sort=False)["seed"].agg(lambda s: tuple(sorted(s)))
        if seeds.nunique() > 1:
            listed = (f"{self.name(str(v))} {len(s)}" for v, s in seeds.items())
            yield f"Methods have different seeds; differences count the common ones: {', '.join(listed)}."
        if len(done) and done.groupby("variant")["headline_last"].mean().max() <= self.majority:
            yield f"No method is above guessing each client's majority class ({percent(self.majority)} %)."
        rows = done["test_median"].median()
        if rows < FEW_ROWS and self.test_data == "own":
            yield f"Few test rows: {rows:.0f} of the median client, so one row is {100 / rows:.1f} points of its score."


def payload_of(label: str, rounds: float = 1, hidden: bool = False) -> str:
    """State what a method exchanges and whether it reveals single classes; empty if it is not installed here.

    Parameters
    ----------
    hidden : the server sees sums over clients alone.
    """
    name, _, own = label.partition("(")
    try:
        fields = registry.get(name).hparams.model_fields
        args = (arg for arg in own.rstrip(")").split() if arg.partition("=")[0].replace("-", "_") in fields)
        method, hparams = registry.configured(name, " ".join(args))
    except BadRequest:
        return ""
    shown = "" if hidden or method.class_threshold(hparams) is None else " The payload shows a client's classes."
    return f"Exchanged: {registry.exchanged(method, rounds)}.{shown}"


def _listed(names: Sequence[str], most: int = 2) -> str:
    if len(names) <= max(most, 1):
        return " and ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more" if most else counted(len(names), "method")


def answers_of(comparison: Comparison) -> list[Answer]:
    """Return the answer of every setting, in the order of results.csv.

    Raises
    ------
    BadRequest : the folder has no results.csv of this version, or no run with a score.
    """
    table, tests, again = comparison.table, comparison.significance, comparison.again
    needed = {*SETTING, *HARM, "variant", "seed", "failed", "headline_last", "all_classes", "majority", "test_median"}
    whole = needed <= {*table} or ("failed" in table and table["failed"].notna().all())
    if not whole or table.empty:
        raise BadRequest(f"{comparison.out} holds no comparison of this version (results.csv of fedapp compare)")
    table = table.assign(failed=table["failed"].astype(object).where(table["failed"].notna(), ""))
    table = table.reindex(columns=dict.fromkeys([*table, *sorted(needed)]))
    if (table["failed"] == "").any() and table["headline_last"].isna().all():
        raise BadRequest(f"{comparison.out} holds no score: {NO_TESTS}")
    settings = table.groupby(SETTING, dropna=False, sort=False)
    asked = comparison.notes["reference"]
    return [Answer(part, _rows(again, key), _rows(tests, key), asked) for key, part in settings]


def _rows(table: pd.DataFrame, key: Sequence[Any]) -> pd.DataFrame:
    """Return the rows of a setting, of one of a comparison's tables."""
    for column, value in zip(SETTING, key):
        if column in table:
            table = table[table[column].isna() if value != value else table[column] == value]
    return table


def setting_title(part: pd.DataFrame) -> str:
    """Name a setting by its rows of results.csv: data set, partition, clients."""
    first = part.iloc[0]
    number = first["classes_per_client"] if pd.isna(first["alpha"]) else first["alpha"]
    kind = first["partition"] + ("" if pd.isna(number) else f" {number:g}")
    sweep = "" if pd.isna(first["sweep"]) else first["sweep"]
    return ", ".join(filter(None, (first["dataset"], kind, counted(int(first["clients"]), "client"), sweep)))


def alerts_of(comparison: Comparison, answers: Sequence[Answer]) -> list[str]:
    """Return the alerts of all settings, each once: failures, runs that may not be compared, settings that differ."""
    own = [alert for answer in answers for alert in answer.alerts()]
    failed = [alert for alert in own if " failed (" in alert]
    return list(dict.fromkeys([*failed, *comparison.notes["alerts"], *own]))


# ---- one screen ------------------------------------------------------------------------------------------------------


def screen(comparison: Comparison, everything: bool = False) -> str:
    """Return the last screen of a comparison, one for each setting, 24 lines of 80 columns if there is one setting.

    Parameters
    ----------
    everything : all methods, all alerts and every word of them.
    """
    width = shutil.get_terminal_size().columns
    answers = answers_of(comparison)
    alerts = _alert_lines(alerts_of(comparison, answers), width, everything)
    ends = [f"  {name:8} {text}" for name, text in _paths(comparison, everything)]
    lines = []
    for answer in answers:
        methods = counted(answer.table.loc[answer.table["method"] != "local", "variant"].nunique(), "method")
        seeds = counted(answer.table["seed"].nunique(), "seed")
        rounds = counted(int(answer.table["rounds"].max()), "round")
        title = f"{methods} on {setting_title(answer.table)}, {rounds}, {seeds}"
        said = _said(answer, width, everything)
        power = [line for text in (answer.power(), answer.variance() * everything) for line in _wrap(text, width)]
        head = [*_wrap(title, width), *said]
        tail = [*power, *alerts, *ends]
        lines += [*head, *_table(answer, width, None if everything else LINES - len(head) - len(tail)), *power]
    return "\n".join([*lines, *alerts, *ends])


def _said(answer: Answer, width: int, everything: bool) -> list[str]:
    """Return the lines of the sentences: three questions always have theirs, in the longest form that fits."""
    for shorter in range(1 if everything else 3):
        found = {question: _wrap(text, width) for question, text in answer.sentences(shorter).items()}
        room = SENTENCES - sum(len(lines) for question, lines in found.items() if question in QUESTIONS)
        if room >= 0:
            break
    lines: list[str] = []
    for question, wrapped in found.items():
        if not everything and question not in QUESTIONS:
            if len(wrapped) > room:
                continue
            room -= len(wrapped)
        lines += wrapped
    return lines


def _wrap(text: str, width: int, **how: Any) -> list[str]:
    """Break a text between words."""
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False, **how)


def _alert_lines(alerts: Sequence[str], width: int, everything: bool) -> list[str]:
    lines: list[str] = []
    for number, alert in enumerate(alerts):
        wrapped, words = _wrap(alert, width, initial_indent="! ", subsequent_indent="  "), alert.split()
        if not everything and len(lines) + len(wrapped) > ALERTS:
            if lines:
                return [*lines, f"! {counted(len(alerts) - number, 'more alert')}"]
            while len(wrapped) > ALERTS:  # what to do stands at the end, so words in the middle are left out
                del words[len(words) // 3]
                cut = " ".join([*words[: len(words) // 3], "…", *words[len(words) // 3 :]])
                wrapped = _wrap(cut, width, initial_indent="! ", subsequent_indent="  ")
        lines += wrapped
    return lines


def _paths(comparison: Comparison, everything: bool) -> Iterator[tuple[str, str]]:
    out = short_path(comparison.out)
    if (out / "report.html").is_file():
        yield "report", str(out / "report.html")
    yield ("folder", str(out)) if everything else ("details", f"fedapp show {shlex.quote(str(out))} --all")


def _table(answer: Answer, width: int, lines: int | None) -> list[str]:
    """Return the lines of the table: as many methods as fit into `lines`, then training alone and guessing."""
    rows = [row_of(answer, v, answer.name(v) + (" *" if v in answer.delivered else "")) for v in answer.methods]
    fixed = [row_of(answer, answer.alone, ALONE)] if answer.alone else []
    if len(answer.again):
        fixed.append([AGAIN, *cells_of(answer, answer.again, None)])
    if not rows and not fixed:
        return []
    fixed.append([GUESS, percent(answer.majority), *[""] * (len([*rows, *fixed][0]) - 2)])
    note = _wrap(f"* {answer.after_training()}", width, subsequent_indent="  ") if answer.delivered else []
    heads = heads_of(answer)
    # A number is never cut: columns that a narrow terminal has no room for are left out, the last ones first.
    widths = [
        max(len(w) for w in [*h.split("\n"), *(row[i] for row in [*rows, *fixed])]) for i, h in enumerate(heads) if i
    ]
    while len(widths) > 1 and sum(widths) + 2 * len(widths) + len(GUESS) > width:
        widths.pop()
    room = min(width - sum(widths) - 2 * len(widths), max(len(row[0]) for row in [*rows, *fixed]))

    def laid(row: Sequence[str]) -> list[str]:
        first, *more = _wrap(row[0], room) or [""]
        return [
            "".join([first.ljust(room), *(f"  {c:>{w}}" for c, w in zip(row[1:], widths))]).rstrip(),
            *(f"  {m}" for m in more),
        ]

    top = [line for level in (0, 1) for line in laid([h.split("\n")[level] for h in heads])]
    below = [line for row in fixed for line in laid(row)]
    shown = [laid(row) for row in rows]
    if lines is not None:
        left = lines - len(top) - len(below) - len(note)
        count = min(len(shown), METHODS)
        while count > 1 and sum(map(len, shown[:count])) + (count < len(shown)) > left:
            count -= 1
        hidden, first = len(shown) - count, shown.copy()
        if answer.leader and (place := answer.methods.index(answer.leader)) >= count:
            first[count - 1] = shown[place]
        shown = [*first[:count], *([[f"{hidden} more: --all shows them"]] if hidden else [])]
    return [*top, *(line for row in shown for line in row), *below, *note]


def heads_of(answer: Answer) -> list[str]:
    """Return the heads of a row's cells, of two lines each; below two seeds there are no differences."""
    against = f"vs\n{ALONE if answer.reference == answer.alone else 'ref.'}"
    differences = {0: [], 1: [], 2: [f"{against}, by seed"]}.get(answer.seeds, [against, "95 %\ninterval"])
    return ["\n", f"{answer.test_data}\ntest", *differences, "gain/same\n/lose", "all\nclasses", "up/\nround"]


def row_of(answer: Answer, label: str, name: str) -> list[str]:
    """Return a method's name and its cells."""
    return [name, *cells_of(answer, answer.finished[answer.finished["variant"] == label], answer.test(label))]


def cells_of(answer: Answer, rows: pd.DataFrame, test: dict[str, Any] | None) -> list[str]:
    """Return own test, differences, harm, all classes and bytes up of the rows of a method in results.csv."""

    def mean(column: str) -> float:
        return mean_and_std(rows[column])[0]

    if answer.seeds < 3:
        differences = [DASH if test is None else intervals.by_seed(test)] if answer.seeds == 2 else []
    elif test is None or test["seeds"] < 3:
        differences = [DASH] * 2
    else:
        differences = [intervals.points(test["mean_difference"]), intervals.interval_text(test)]
    harmed = tally(rows[HARM].to_numpy()).replace(" ", "") if rows[HARM].notna().any().any() else DASH
    return [percent(mean("headline_last")), *differences, harmed, percent(mean("all_classes")), size(mean("bytes_up"))]
