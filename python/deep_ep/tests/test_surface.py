"""The interface that programs import: paths, names, signatures."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import subprocess
import sys

import pytest
import torch

import deep_ep
import ferry

PRIVATE_OF_GROUPS = ("_native", "_in_flight", "_memory")
UTILS = ("envs", "gate", "math", "refs", "testing")
SNAPSHOT = pathlib.Path(__file__).with_name("signatures.json")


def signatures() -> dict[str, str]:
    found = {}
    for name in sorted(deep_ep.__all__):
        thing = getattr(deep_ep, name)
        if inspect.isclass(thing):
            found[name] = str(inspect.signature(thing.__init__))
            for member in sorted(vars(thing) | {key: None for base in thing.__bases__ for key in vars(base)}):
                attribute = inspect.getattr_static(thing, member)
                if not member.startswith("_") and (callable(attribute) or isinstance(attribute, staticmethod)):
                    kind = "static " if isinstance(attribute, staticmethod) else ""
                    found[f"{name}.{member}"] = kind + str(inspect.signature(getattr(thing, member)))
        elif inspect.isfunction(thing):
            found[name] = str(inspect.signature(thing))
    for part in UTILS:
        module = importlib.import_module(f"deep_ep.utils.{part}")
        for name in module.__all__:
            found[f"utils.{part}.{name}"] = str(inspect.signature(getattr(module, name)))
    return found


def test_signatures_are_those_of_the_snapshot() -> None:
    """A change here affects programs: check it, then rewrite the snapshot by running this file."""
    assert signatures() == json.loads(SNAPSHOT.read_text())


def test_positional_order_of_what_programs_call() -> None:
    def names(call: object) -> list[str]:
        return list(inspect.signature(call).parameters)

    assert names(deep_ep.Buffer)[:4] == ["group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode"]
    assert names(deep_ep.Buffer.combine)[:5] == ["self", "x", "handle", "topk_weights", "bias"]
    assert names(deep_ep.Buffer.low_latency_dispatch)[:5] == [
        "self",
        "x",
        "topk_idx",
        "num_max_dispatch_tokens_per_rank",
        "num_experts",
    ]
    assert names(deep_ep.Buffer.low_latency_combine)[:5] == ["self", "x", "topk_idx", "topk_weights", "handle"]
    assert names(deep_ep.ElasticBuffer.dispatch)[:4] == ["self", "x", "topk_idx", "topk_weights"]
    assert names(deep_ep.ElasticBuffer.combine)[:5] == ["self", "x", "handle", "topk_weights", "bias"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("deep_ep", "Buffer Config ElasticBuffer EPBuffer EPHandle EventHandle EventOverlap topk_idx_t"),
        ("deep_ep.utils", "EventHandle EventOverlap"),
        ("deep_ep.utils.event", "EventHandle EventOverlap"),
        ("deep_ep.buffer", "Buffer Config EventHandle EventOverlap"),
        ("deep_ep.buffers", "Buffer ElasticBuffer EPBuffer EPHandle"),
        ("deep_ep.buffers.legacy", "Buffer Config EventHandle EventOverlap"),
        ("deep_ep.buffers.elastic", "ElasticBuffer EPHandle"),
        ("deep_ep.buffers.ep", "EPBuffer EPHandle"),
        ("deep_ep.comm", "destroy_all_managed_nccl_comm get_logical_domain_size get_physical_domain_size"),
        ("deep_ep._C", "Config EventHandle topk_idx_t"),
        ("deep_ep_cpp", "Config EventHandle topk_idx_t"),
    ],
)
def test_import_paths_lead_to_the_same_things(module: str, names: str) -> None:
    imported = importlib.import_module(module)
    for name in names.split():
        assert getattr(imported, name) is getattr(deep_ep, name)
    assert pathlib.Path(imported.__spec__.origin).is_file()


def test_importing_does_nothing_else() -> None:
    program = "import deep_ep, deep_ep_cpp, torch; assert not torch.cuda.is_initialized()"
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")


def private_parts_of_ferry(path: pathlib.Path) -> list[str]:
    """Names of ferry that begin with an underscore, as a source file imports them or asks objects of ferry for them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE_OF_GROUPS:
            names = [f"ferry.{node.attr}"]
        for name in names:
            first, *parts = name.split(".")
            if first == "ferry" and any(part.startswith("_") for part in parts):
                found.append(f"{path.name}:{node.lineno}: {name}")
    return found


def test_the_package_uses_the_public_names_of_ferry_alone(tmp_path: pathlib.Path) -> None:
    files = sorted(pathlib.Path(deep_ep.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    assert [name for path in files for name in private_parts_of_ferry(path)] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import ferry._eager\nfrom ferry import _native\nfrom ferry._latency import Sent\ngroup._native\n")
    assert len(private_parts_of_ferry(wrong)) == 4


def test_version() -> None:
    assert deep_ep.__version__ == f"2.1.0+ferry{ferry.__version__}"
    try:
        installed = importlib.metadata.version("deep_ep")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deep_ep is on the path but not installed")
    assert installed == deep_ep.__version__


def test_small_things() -> None:
    assert deep_ep.topk_idx_t is torch.int64
    assert deep_ep.Buffer.is_sm90_compiled() is True
    assert deep_ep.destroy_all_managed_nccl_comm() is None


def test_a_constructor_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep.Buffer, "__init__", lambda self, *arguments, **options: None)
    assert isinstance(deep_ep.Buffer("anything"), deep_ep.Buffer)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(signatures(), indent=2) + "\n")
