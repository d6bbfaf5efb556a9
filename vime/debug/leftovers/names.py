"""What a name in a source file stands for: imports, aliases and scopes followed, nothing imported and nothing run.

``import ray as r; r.init()`` is ``ray.init``; a ``breakpoint`` the file defines itself is nobody's.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field

MAX_ALIASES = 8
"""Assignments followed from one name; more are a riddle."""


@dataclass(frozen=True, slots=True, eq=False)
class Import:
    """One name that an import binds: ``statement.names[index]``, which stands for ``qualified``."""

    statement: ast.Import | ast.ImportFrom
    index: int
    qualified: str


@dataclass(eq=False, slots=True)
class Scope:
    """Names bound in a module, class, function, lambda or comprehension.

    imports  by name, in order
    aliases  by name, what was assigned to it where that is a name or an attribute
    others   names bound in any other way, of which nothing is known
    elsewhere  names declared global or nonlocal -> the scope that holds them
    """

    parent: Scope | None = None
    is_class: bool = False
    is_comprehension: bool = False
    imports: dict[str, list[Import]] = field(default_factory=lambda: defaultdict(list))
    aliases: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    others: set[str] = field(default_factory=set)
    elsewhere: dict[str, Scope] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        return name in self.others or name in self.imports or name in self.aliases

    def owner(self, name: str) -> Scope | None:
        """The scope where ``name``, used here, is bound; None: nowhere in this file, so at most a builtin."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.elsewhere:
                return scope.elsewhere[name]
            if scope.holds(name) and (not scope.is_class or scope is self):
                return scope
            scope = scope.parent
        return None

    def to_bind(self, name: str) -> Scope:
        """The scope that binding ``name`` here changes."""
        return self.elsewhere.get(name, self)


class Names(ast.NodeVisitor):
    """The names of one module.

    uses   each ``ast.Name`` with the scope it stands in, in order
    calls  each ``ast.Call`` with its scope, in order
    writes each assignment with its scope, in order
    """

    def __init__(self, tree: ast.Module) -> None:
        self.module = self._scope = Scope()
        self.uses: list[tuple[ast.Name, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.writes: list[tuple[ast.Assign | ast.AnnAssign, Scope]] = []
        for statement in tree.body:
            self.visit(statement)

    def qualified(self, node: ast.expr, scope: Scope, depth: int = 0) -> list[str]:
        """The dotted names ``node`` may stand for; [] where it is something of the file's own."""
        if depth > MAX_ALIASES:
            return []
        if isinstance(node, ast.Attribute):
            return [f"{name}.{node.attr}" for name in self.qualified(node.value, scope, depth)]
        if isinstance(node, ast.Call):
            return self._result(node, scope, depth)
        if not isinstance(node, ast.Name):
            return []
        owner = scope.owner(node.id)
        if owner is None:
            return [f"builtins.{node.id}"]
        if node.id in owner.others:
            return []
        found = [one.qualified for one in owner.imports.get(node.id, ())]
        for value in owner.aliases.get(node.id, ()):
            found += self.qualified(value, owner, depth + 1)
        return found

    def _result(self, node: ast.Call, scope: Scope, depth: int) -> list[str]:
        """What a call returns: the module of ``__import__("x")``, otherwise ``name()``."""
        found = []
        for name in self.qualified(node.func, scope, depth):
            module = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if name == "builtins.__import__" and isinstance(module, str):
                found.append(module.partition(".")[0])
            elif name == "importlib.import_module" and isinstance(module, str):
                found.append(module)
            else:
                found.append(f"{name}()")
        return found

    def imports(self, node: ast.expr, scope: Scope) -> list[tuple[Scope, str]]:
        """(scope, name) of the import that ``node`` begins with, as the key of what it uses; [] where there is none."""
        while isinstance(node, ast.Attribute | ast.Call):
            node = node.value if isinstance(node, ast.Attribute) else node.func
        if not isinstance(node, ast.Name):
            return []
        owner = scope.owner(node.id)
        return [(owner, node.id)] if owner is not None and node.id in owner.imports else []

    # Binding

    def _bind(self, name: str) -> None:
        self._scope.to_bind(name).others.add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for index, alias in enumerate(node.names):
            top = alias.name.partition(".")[0]
            name = alias.asname or top
            found = Import(node, index, alias.name if alias.asname else top)
            self._scope.to_bind(name).imports[name].append(found)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = "." * node.level + (node.module or "")
        for index, alias in enumerate(node.names):
            name = alias.asname or alias.name
            self._scope.to_bind(name).imports[name].append(Import(node, index, f"{origin}.{alias.name}"))

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.elsewhere.update(dict.fromkeys(node.names, self.module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            owner = self._scope.parent.owner(name) if self._scope.parent else None
            self._scope.elsewhere[name] = owner or self.module

    def visit_Assign(self, node: ast.Assign) -> None:
        self.writes.append((node, self._scope))
        self.visit(node.value)
        for target in node.targets:
            self._target(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.writes.append((node, self._scope))
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
        self._target(node.target, node.value)

    def _target(self, target: ast.expr, value: ast.expr | None) -> None:
        """``name = other.name`` is an alias, ``name = None`` tells nothing, anything else is unknown."""
        if not isinstance(target, ast.Name):
            self.visit(target)
            return
        self.uses.append((target, self._scope))
        is_none = isinstance(value, ast.Constant) and value.value is None
        if value is not None and (is_none or isinstance(value, ast.Name | ast.Attribute)):
            self._scope.to_bind(target.id).aliases[target.id].append(value)
        else:
            self._bind(target.id)

    def visit_Name(self, node: ast.Name) -> None:
        self.uses.append((node, self._scope))
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        scope = self._scope
        while scope.is_comprehension and scope.parent is not None:
            scope = scope.parent
        self.uses.append((node.target, scope))
        scope.to_bind(node.target.id).others.add(node.target.id)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self._bind(node.rest)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append((node, self._scope))
        self.generic_visit(node)

    # Scopes

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        outside = [*node.decorator_list, *([node.returns] if node.returns else [])]
        self._function(node.args, outside, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node.args, [], [node.body])

    def _function(self, args: ast.arguments, outside: list[ast.expr], body: list[ast.stmt] | list[ast.expr]) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        annotations = [arg.annotation for arg in every if arg.annotation]
        for node in (*outside, *args.defaults, *filter(None, args.kw_defaults), *annotations):
            self.visit(node)
        self._inside(Scope(self._scope, others={arg.arg for arg in every}), list(body))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._inside(Scope(self._scope, is_class=True), node.body)

    def _comprehension(self, node: ast.expr) -> None:
        self._inside(Scope(self._scope, is_comprehension=True), list(ast.iter_child_nodes(node)))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _inside(self, scope: Scope, nodes: list[ast.AST] | list[ast.stmt]) -> None:
        before, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = before
