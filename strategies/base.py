"""`Strategy`: the server side of a method, its mathematics as pure functions.

A method defines only its mathematics. The table lists the functions that it may define, in the order in which they are
called. Each function returns new values and does not change its arguments. Everything that must be remembered is in the
state, so a checkpoint contains all of it. `self.context`, `self.method` and `self.hparams` never change during a run.

| function                                  | when                                   | returns                 |
|-------------------------------------------|----------------------------------------|-------------------------|
| `init(context)`                           | once, before round 1                   | the first state         |
| `prepare(state, query)`                   | once, between `init` and round 1       | the first state         |
| `send(state, server_round, client)`       | for each client that gets a message    | its payload             |
| `send_each(state, server_round, clients)` | instead of `send`, if it is cheaper    | pairs (client, payload) |
| `check(state, reply)`                     | for each reply as it arrives           | its fault, or None      |
| `update(state, server_round, reduced)`    | once per round                         | the next state          |
| `global_arrays(state)`                    | after each round                       | the one model, or None  |
| `finalize(state, query)`                  | once, after the last round             | the final state         |
| `report(state, final)`                    | once, after the final evaluation       | entries of the summary  |
| `blend(state, sizes)`                     | when a figure of the run is drawn      | the mixing matrix       |

`reduced` holds the reductions that the method declares in `Method.reduces` (`fedapp/reduce/spec.py`). A class that
defines `aggregate(state, server_round, replies)` instead of `update` gets the checked replies one at a time, in the
order of the client ids, and must read all of them.
`query` is the only other exchange with clients. It returns the reductions that `Method.reduces` declares for
`query.<kind>`. `final` holds the clients' last scores.

A class may name entries of its state that only note numbers in `records`. It replaces nothing else of its bases.

The state is a nested dict of arrays and plain values. `fedapp/federation/loop.py` calls these functions round by round;
`strategies/_flower.py` runs the same functions in Flower's own loop, for apps other than fedapp.
"""

from __future__ import annotations

from typing import Any

from fedapp.method import Method, Reductions
from fedapp.reduce.spec import USUAL, Each
from strategies._flower import FlowerStrategy
from strategies._maths import Maths


class Strategy(Maths, FlowerStrategy):
    """Base of all strategies; without changes it is FedAvg on the method's shared arrays.

    Parameters
    ----------
    method, hparams : the method and its hyperparameters.
    flower : arguments of `FlowerStrategy`: the run's policy, and settings of Flower's own loop.
    """

    def __init__(self, method: Method, hparams: Any, **flower: Any) -> None:
        Maths.__init__(self, method, hparams)
        FlowerStrategy.__init__(self, self, **flower)

    @classmethod
    def usual_reductions(cls) -> Reductions:
        """Return the reductions of a method that declares none: the mean.

        A class of another package, or with an `aggregate` of its own, may read single replies too.
        """
        known = cls.__module__.startswith("strategies.") and cls.aggregate is FlowerStrategy.aggregate
        return super().usual_reductions() if known else {"train": {**USUAL, "replies": Each(grouped=True)}}
