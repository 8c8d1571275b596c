"""Small faults for a Python file: `mutants(file, source)` lists every place that can be changed, and what it becomes.

A fault is an edit of the text, so its diff reads like one made by a person. Strings, docstrings, type annotations,
decorators, messages, assertions, log calls and `__all__` are left alone.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from itertools import accumulate

SYMBOLS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
"""An operator in the source and what it becomes."""
EITHER_OR = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose change is their negation."""
PAIRS = "min max, argmin argmax, minimum maximum, sum mean, any all, floor ceil, zeros ones, zeros_like ones_like"
SWAPPED = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
"""A function's name and what it becomes."""
METHODS = {
    "abs", "clone", "contiguous", "copy", "detach", "double", "eval", "exp", "float", "log", "sqrt", "square", "t",
    "train",
}  # fmt: skip
"""Methods without arguments that are left out: `x.detach()` becomes `x`."""
FUNCTIONS = {
    "abs", "deepcopy", "exp", "log", "log_softmax", "normalize", "relu", "sigmoid", "softmax", "sorted", "sqrt",
    "square", "tanh",
}  # fmt: skip
"""Functions that are left out: `sorted(x)` becomes `x`."""
SYMMETRIC = {"allclose", "array_equal", "hypot", "isclose", "isinstance", "max", "maximum", "min", "minimum"}
"""Functions for which exchanging two arguments changes nothing or always raises."""
SILENT = {"critical", "debug", "error", "exception", "info", "print", "warn", "warning"}
"""Calls that only write messages."""
NO_NUMBERS = {"copy", "description", "flush", "frozen", "non_blocking", "set_to_none", "stacklevel", "strict"}
"""Keywords whose values do not change a number."""


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a file become `new`; `function` is the dotted name of the enclosing function."""

    file: str
    function: str
    start: int
    end: int
    new: str

    def applied(self, source: str) -> str:
        """Return the source with the fault."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def changes(self, source: str) -> bool:
        """Whether the result is valid Python and differs from the original."""
        try:
            return ast.dump(ast.parse(self.applied(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def lines(self, source: str) -> tuple[str, str]:
        """Return the changed lines before and after, without indentation."""
        diff = list(difflib.ndiff(source.splitlines(), self.applied(source).splitlines()))
        before, after = ("\n".join(d[2:].strip() for d in diff if d.startswith(sign)) for sign in ("- ", "+ "))
        return before, after


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all faults of a file, in the order of its text."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda m: (m.start, m.end, m.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.raw = file, source.encode()
        self.starts = [0, *accumulate(len(line) for line in self.raw.splitlines(keepends=True))]
        self.scope: list[str] = []
        self.found: list[Mutant] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = node.__dict__
        return self.starts[at["lineno"] - 1] + at["col_offset"], self.starts[at["end_lineno"] - 1] + at[
            "end_col_offset"
        ]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def put(self, where: ast.AST | tuple[int, int], new: str) -> None:
        start, end = where if isinstance(where, tuple) else self.span(where)
        self.found.append(Mutant(self.file, ".".join(self.scope), start, end, new))

    def operator(self, left: ast.AST, operator: ast.AST, right: ast.AST | None, *, suffix: str = "") -> None:
        """Change the symbol between two nodes."""
        if type(operator) not in SYMBOLS:
            return
        symbol, new = (s + suffix for s in SYMBOLS[type(operator)])
        start = self.span(left)[1]
        gap = self.raw[start : self.span(right)[0] if right else None].decode()
        if (at := gap.find(symbol)) >= 0:
            begin = start + len(gap[:at].encode())
            self.put((begin, begin + len(symbol)), new)

    def negate(self, condition: ast.expr) -> None:
        whole = isinstance(condition, ast.Compare) and isinstance(condition.ops[0], EITHER_OR)
        if not whole and not (isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)):
            self.put(condition, f"(not {self.closed(condition)})")

    def closed(self, node: ast.expr) -> str:
        """Return the text of a node, in parentheses where an operator that follows needs them."""
        text = self.text(node)
        return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"

    def body(self, name: str, parts: list[ast.AST]) -> None:
        self.scope.append(name)
        for part in parts:
            self.visit(part)
        self.scope.pop()

    # Statements --------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
        self.body(node.name, [*defaults, *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.body(node.name, [*node.body])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return
        if all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
            self.put(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.put(node, "pass")
        self.operator(node.target, node.op, node.value, suffix="=")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name(node.value) not in SILENT:
            self.put(node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.put(node, "return None")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.put(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.put(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self.put(node, "continue")

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if self.text(node.test) != "TYPE_CHECKING":
            self.negate(node.test)
            self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Assert(self, node: ast.AST) -> None:
        """Skip the node and everything in it."""

    visit_Import = visit_ImportFrom = visit_JoinedStr = visit_Assert

    # Expressions -------------------------------------------------------------------------------------

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.operator(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.operator(left, operator, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.operator(left, node.op, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        number = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if type(number) is int:  # mostly an axis from the end, where the positive one may be the same
            self.put(node.operand, str(number + 1))
            return
        self.put(node, self.closed(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.put(node, str(not value))
        elif isinstance(value, int):
            self.put(node, str(value + 1))
        elif isinstance(value, float) and not 0 < abs(value) < 1e-6:  # tiny ones only avoid a division by 0
            self.put(node, str(2 * value or 1.0))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
                self.put(bound, f"{self.closed(bound)} + 1")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in NO_NUMBERS:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name, args = _name(node), node.args
        if name in SILENT:
            return
        if name in SWAPPED:
            end = self.span(node.func)[1]
            self.put((end - len(name), end), SWAPPED[name])
        if isinstance(node.func, ast.Attribute) and name in METHODS and not args and not node.keywords:
            self.put(node, self.text(node.func.value))
        if name in FUNCTIONS and args:
            self.put(node, f"({self.text(args[0])})")
        if name == "range" and not isinstance(end_of := args[:2][-1], ast.Constant):
            self.put(end_of, f"{self.closed(end_of)} - 1")
        if len(args) > 1 and name not in SYMMETRIC and not any(isinstance(a, ast.Starred) for a in args[:2]):
            between = self.raw[self.span(args[0])[1] : self.span(args[1])[0]].decode()
            if self.text(args[0]) != self.text(args[1]):
                whole = (self.span(args[0])[0], self.span(args[1])[1])
                self.put(whole, self.text(args[1]) + between + self.text(args[0]))
        self.generic_visit(node)


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
