"""Take a Python module apart into pieces that change, and are executed, by themselves."""

import ast
import hashlib
from collections.abc import Iterable, Iterator

MODULE = ""  # in the place of a function: what a module does when it is imported
IMPORT, CONSTANT = "import ", "constant "
Parts = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def digest(node: ast.AST | str) -> str:
    """Return a short digest of a piece of a syntax tree, its place in the file aside."""
    text = node if isinstance(node, str) else ast.dump(node)
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def pieces(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Take a module apart: functions, constants, imported names, and what is left of it.

    A piece is to be read before the next one is asked for: then functions lose their bodies, for
    what is left has the classes with the names and decorators of their methods alone.
    """
    rest: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module = statement.module if isinstance(statement, ast.ImportFrom) else None
            for alias in statement.names:
                name = alias.asname or alias.name
                yield f"{IMPORT}{name}", ast.Constant(f"{module} {alias.name}")
        elif name := constant_name(statement):
            yield f"{CONSTANT}{name}", statement
        elif isinstance(statement, Function) and not statement.decorator_list:
            yield statement.name, statement
        else:
            yield from functions_in([statement], "")
            rest.append(statement)
    for statement in rest:
        strip(statement)
    yield MODULE, ast.Module(rest, [])


def constant_name(statement: ast.stmt) -> str | None:
    """Return the name that a statement binds once, if it does no more than that."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) and not target.id.startswith("__") else None


def functions_in(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions with their qualified names, those within functions excepted."""
    for node in body:
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions_in(node.body, f"{prefix}{node.name}.")
        else:
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            yield from functions_in(inner, prefix)


def strip(node: ast.AST) -> None:
    """Leave of each function its name, or its whole head if a decorator may read that."""
    if isinstance(node, Function):
        node.body = []
        if not node.decorator_list:
            node.args, node.returns = ast.arguments([], [], None, [], [], None, []), None
        return
    for child in ast.iter_child_nodes(node):
        strip(child)


def parts_of(source: str) -> Parts:
    """Return the digest of every piece of a module; pieces of one name count as one."""
    found: dict[str, str] = {}
    for name, node in pieces(ast.parse(source)):
        found[name] = digest(found.get(name, "") + digest(node)) if name in found else digest(node)
    return found


def mentions(source: str, name: str) -> set[str]:
    """Return the pieces of a module in which a name stands, as a variable, attribute or string."""
    found = set()
    for piece, node in pieces(ast.parse(source)):
        for each in ast.walk(node):
            held = getattr(each, "id", getattr(each, "attr", getattr(each, "value", None)))
            is_imported = piece.startswith(IMPORT) and str(held).endswith(f" {name}")
            is_imported = is_imported or str(held).endswith(f".{name}")  # as monkeypatch names it
            if (held == name or is_imported) and piece != f"{CONSTANT}{name}":
                found.add(piece)
    return found
