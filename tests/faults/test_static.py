"""Case 34: nothing in the package can run what it is sent."""

import ast
import re

import pytest
from support.faults import note
from support.package import ROOT

FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing", "code", "codeop",
    "pty", "runpy", "xmlrpc", "socketserver", "http.server", "torch.multiprocessing", "torch.distributed.rpc", "torch.package",
    "torch.hub", "asyncio.subprocess", "commands", "popen2", "yaml",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp",
    "subprocess.getoutput", "subprocess.getstatusoutput", "torch.jit.load", "torch.export.load", "torch.utils.cpp_extension.load",
    "torch.ops.load_library", "torch.serialization.add_safe_globals", "torch.distributed.TCPStore", "torch.distributed.HashStore",
    "socket.create_server", "importlib.reload", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "asyncio.create_subprocess_shell", "asyncio.start_server", "aiohttp.web.run_app",
}  # fmt: skip
FORBIDDEN_PREFIXES = ("os.exec", "os.spawn")
# By their last name, whatever they hang on: object collectives pickle; `listen` opens a port.
FORBIDDEN_METHODS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list",
    "_object_to_tensor", "_tensor_to_object", "rpc_sync", "rpc_async", "listen", "send_pyobj", "recv_pyobj", "find_class",
    "run_app",
}  # fmt: skip
# Code by name, each with its reason.
DYNAMIC_IMPORTS = {
    ("cp_runtime/comfy/shared/modules.py", "take_module"): "on a rank, for its parent; in ComfyUI's process what it has imported",
    ("cp_runtime/engine/attention/kernels.py", "installed"): "callers pass literals, or a name of SAGE_MODES",
    ("cp_runtime/families/__init__.py", ""): "the files of its own folder",
    ("cp_runtime/pool/rank_program.py", "import_by_name"): "a constant, or what the owner of the pool names",
    ("cp_runtime/pool/rank_program.py", "load_package"): "this package itself",
    ("cp_runtime/pool/worker.py", "_import"): "the owner of the pool names the module, among those of this package",
    ("cp_runtime/comfy/rank/attention.py", "attention_by_name"): "the names are in the plan tables",
}
# Parts of FORBIDDEN_MODULES, each with its reason.
PARTS = {
    ("cp_runtime/comfy/shared/objects.py", "pickle.Pickler"): "ComfyUI's process writes for its own ranks, and reads nothing",
    ("cp_runtime/comfy/rank/objects.py", "pickle.Unpickler"): "a rank, for its parent; `ui` imports nothing of `rank`",
}
# Uses of FORBIDDEN_CALLS, each with its reason.
PROCESSES = {
    ("cp_runtime/system/interfaces.py", "listening_port", "socket.create_server"): "its one caller names loopback",
    ("cp_runtime/pool/blocks.py", "store_port", "torch.distributed.TCPStore"): "on loopback: nothing in it is unpickled",
    ("cp_runtime/comfy/rank/objects.py", "find_class", "?.find_class"): "of the one reader: it knows this package's own functions",
    ("cp_runtime/pool/worker.py", "_connect", "torch.distributed.TCPStore"): "its client",
    ("cp_runtime/pool/ssh_guard.py", "fork_guarded", "os.fork"): "before anything is imported; the rank runs no other program",
}


class Offences(ast.NodeVisitor):
    """Collects what a module must not do, with the line."""

    def __init__(self, file: str) -> None:
        self.file, self.found, self.names, self.inside = file, [], {}, [""]

    def offence(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{self.file}:{node.lineno}: {what}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported(node, alias.name)
            self.names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if node.module and not node.level else alias.name
            self.imported(node, full)
            self.names[alias.asname or alias.name] = full
            if self.forbidden(full) or alias.name in FORBIDDEN_METHODS:
                self.offence(node, f"imports {full}")

    def imported(self, node: ast.AST, name: str) -> None:
        parts = name.split(".")
        if (self.file, name) not in PARTS and any(".".join(parts[:n]) in FORBIDDEN_MODULES for n in range(1, len(parts) + 1)):
            self.offence(node, f"imports {name}")

    def dotted(self, node: ast.AST) -> str:
        """Full name of an expression such as `dist.broadcast`, aliases resolved; its last name where it hangs on a value."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        return "?"

    def forbidden(self, name: str) -> bool:
        return name in FORBIDDEN_CALLS or name.startswith(FORBIDDEN_PREFIXES)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        self.imported(node, name)
        if (self.file, self.inside[-1], name) in PROCESSES:
            return
        if self.forbidden(name) or node.attr in FORBIDDEN_METHODS:
            self.offence(node, f"uses {name}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (self.forbidden(self.dotted(node)) or node.id == "__debug__"):
            self.offence(node, f"uses {self.dotted(node)}")

    def visit_Assert(self, node: ast.Assert) -> None:
        self.offence(node, "an assert, which python -O leaves out")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}

        def is_true(argument: str) -> bool:
            return isinstance(given.get(argument), ast.Constant) and given[argument].value is True

        if name == "torch.load" and not is_true("weights_only"):
            self.offence(node, "torch.load without weights_only=True")
        if name.endswith("numpy.load") and "allow_pickle" in given:
            self.offence(node, "numpy.load with allow_pickle")
        if "shell" in given and not (isinstance(given["shell"], ast.Constant) and given["shell"].value is False):
            self.offence(node, "a shell")
        literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
        dynamic = name in ("importlib.import_module", "import_module") and not literal
        dynamic |= name.endswith("spec_from_file_location")
        if dynamic and (self.file, self.inside[-1]) not in DYNAMIC_IMPORTS:
            self.offence(node, "imports a module by a name from elsewhere")
        if name == "getattr" and len(node.args) > 1 and self.dotted(node.args[0]) in ("builtins", "__builtins__", "os", "sys"):
            self.offence(node, f"takes something out of {self.dotted(node.args[0])} by name")
        self.generic_visit(node)


def offences(source: str, file: str = "snippet.py") -> list[str]:
    """What a module does that it must not."""
    visitor = Offences(file)
    visitor.visit(ast.parse(source))
    return visitor.found


BAD_SNIPPETS = [
    "import pickle as p",
    "from pickle import loads",
    "from multiprocessing import connection",
    "import torch\nx = torch.multiprocessing.Queue()",
    "import builtins\nbuiltins.eval('1')",
    "import os as o\no.system('true')",
    "import os\nos.execv(a, b)",
    "import subprocess as s\ns.Popen('true', shell=flag)",
    "import torch\ntorch.load(path, weights_only=flag)",
    "import numpy\nnumpy.load(path, allow_pickle=True)",
    "import torch.distributed as dist\ndist.broadcast_object_list(x)",
    "sock.listen()",
    "from importlib import import_module\nimport_module(name)",
    "assert x > 0, 'a check'",
]


@pytest.mark.parametrize("snippet", BAD_SNIPPETS)
def test_the_static_check_finds(snippet):
    assert offences(snippet)


def test_comfyuis_process_unpickles_nothing():
    """Only ranks have what reads a pickle, and nothing outside of their folder imports from it."""
    sides = {"cp_runtime/comfy/rank", "cp_runtime/pool/rank_program.py"}
    for file in sorted((ROOT / "cp_runtime").rglob("*.py")):
        place = str(file.relative_to(ROOT))
        if not place.startswith(tuple(sides)):
            source = file.read_text()
            assert "npickler" not in source, place
            assert not re.search(r"^\s*(from|import) \S*(comfy\.rank|\.\.rank)\b", source, re.MULTILINE), place


def test_no_code_of_the_package_can_run_what_it_is_sent():
    files = [ROOT / "__init__.py", *sorted((ROOT / "cp_runtime").rglob("*.py")), *sorted((ROOT / "nodes").rglob("*.py"))]
    found = [line for file in files for line in offences(file.read_text(), str(file.relative_to(ROOT)))]
    note("34 static check", "files checked (at least)", 40, len(files))
    assert len(files) > 40
    assert found == []
