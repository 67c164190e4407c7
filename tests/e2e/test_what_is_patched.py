"""The import of the package changes only these places in torch. A new patch belongs in this list, and in `_torch`.

One more change is in C++, where no comparison is possible: a translator of exceptions (``_torch/patches.py``).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import workers

PATCHED = {
    # The code of `rpc.init_rpc`, which programs may have imported, and the function that the new code calls.
    "torch.distributed.rpc.init_rpc.__code__",
    "torch.distributed.rpc._torch_ucx_rpc_init_rpc",
    # "UCX" as a backend: a new enum in both places, and a new member of the former enum.
    "torch.distributed.rpc.BackendType",
    "torch.distributed.rpc.backend_registry.BackendType",
    "torch.distributed.rpc.backend_registry.BackendType.UCX",
    # Calls, and waits for them.
    "torch.distributed.rpc.api._invoke_rpc",
    "torch._C.Future.wait",
    # Graceful shutdown.
    "torch.distributed.rpc.api._wait_all_workers",
    "torch.distributed.rpc.api._delete_all_user_and_unforked_owner_rrefs",
    "torch.distributed.rpc.api._destroy_rref_context",
    # The tensors that a future finds in a value.
    "torch._jit_internal._TensorExtractor.persistent_id",
    # The exception of a callee.
    "torch.distributed.rpc.internal._handle_exception",
    "torch.distributed.rpc.internal.deserialize",
    # A message that cannot be pickled or sent leaves nothing behind.
    "torch.distributed.rpc.api._invoke_rpc_python_udf",
    "torch.distributed.rpc.api._invoke_remote_python_udf",
    "torch.distributed.rpc.internal._InternalRPCPickler.serialize",
    "torch._C._distributed_rpc.PyRRef._serialize",
    # How values are pickled, and how Python's own pickle treats the type of a callee's exception.
    "torch.distributed.rpc.internal._internal_rpc_pickler._dispatch_table",
    "copyreg.dispatch_table[torch_ucx_rpc._torch.exceptions._TypeOfBoth]",
}

# The types in the table of torch's pickler that are new or have another reducer. A type of array is added with its
# first array.
REDUCED = {
    "torch.Tensor",
    "torch.distributed.rpc.internal.PythonUDF",
    "torch_ucx_rpc._torch.exceptions._TypeOfBoth",
}

COMPARE = '''
import copyreg, json, sys, types
import torch, torch.distributed.rpc as rpc

def parts(value):
    """The replaceable parts of an object, by the end of their names."""
    if isinstance(value, types.ModuleType) or type(value).__module__.startswith("torch"):
        return {f".{name}": part for name, part in getattr(value, "__dict__", {}).items()}
    if isinstance(value, type):
        return {f".{name}": part for name, part in vars(value).items()}
    if isinstance(value, types.FunctionType):
        return {f".{name}": getattr(value, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
    if isinstance(value, dict):
        return {f"[{name_of(key)}]": part for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return {}

def name_of(key):
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else repr(key)

def is_torchs(value):
    if isinstance(value, (types.ModuleType, dict, list, tuple)):
        return True
    # Operators cache what they are asked, which would look like a change.
    if isinstance(value, torch._ops.OpOverload):
        return False
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(owner.__module__).split(".")[0] == "torch"

# The place, the object and its parts, by the object's id; two levels below a module.
seen = {}

def look(place, value, depth):
    if id(value) in seen or not is_torchs(value):
        return
    seen[id(value)] = place, value, parts(value)
    if depth:
        for end, part in list(seen[id(value)][2].items()):
            if not isinstance(part, types.ModuleType):
                look(place + end, part, depth - 1)

for name, module in list(sys.modules.items()):
    if isinstance(module, types.ModuleType) and (name.split(".")[0] == "torch" or name == "copyreg"):
        look(name, module, 2)
pickler = rpc.internal._internal_rpc_pickler
table_before = dict(pickler._dispatch_table)

nothing = object()

def report():
    changed = [
        place + end
        for place, value, before in seen.values()
        for after in [parts(value)]
        for end in {**before, **after}
        if before.get(end, nothing) is not after.get(end, nothing)
        # Importing a module adds it to its package.
        and not (end not in before and isinstance(after.get(end), types.ModuleType))
    ]
    table = pickler._dispatch_table
    reduced = [name_of(key) for key in table if table[key] is not table_before.get(key)]
    print(json.dumps({"objects": len(seen), "changed": changed, "reduced": reduced}))

import torch_ucx_rpc
report()

# Further patches, for the test of this test.
def anything(*arguments): pass
torch.nn.Linear.forward = anything
torch.nn.Linear.extra_repr.__code__ = anything.__code__
torch.ones_like = anything
torch.distributed.rpc.functions.async_execution.__defaults__ = (1,)
torch.optim.lr_scheduler.__all__[0] = "nothing"
del rpc.PyRRef.to_here
pickler._dispatch_table[bytes] = anything
report()
'''


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Return the changes in a fresh interpreter after importing the package, and after further patches."""
    [ended] = workers.run_program(COMPARE)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_importing_changes_only_the_listed_places(reports: list[dict[str, Any]]) -> None:
    report, _ = reports
    # torch 2.13 has about 30,000 objects. Far fewer would mean that the test looks in the wrong places.
    assert report["objects"] > 10_000
    assert set(report["changed"]) == PATCHED
    assert set(report["reduced"]) == REDUCED


def test_a_further_patch_is_found_wherever_it_is_made(reports: list[dict[str, Any]]) -> None:
    _, report = reports
    assert set(report["changed"]) - PATCHED == {
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.modules.linear.Linear.extra_repr.__code__",
        "torch.ones_like",
        "torch.distributed.rpc.functions.async_execution.__defaults__",
        "torch.optim.lr_scheduler.__all__[0]",
        "torch._C._distributed_rpc.PyRRef.to_here",
    }
    assert set(report["reduced"]) - REDUCED == {"builtins.bytes"}
