"""anypo: any policy optimization. Published methods as small, tested parts on one engine.

    import anypo
    result = anypo.train("grpo", task="arithmetic", steps=60)
    method = anypo.get("grpo").but(name="mine", credit=anypo.get("gdpo").credit)

Names are imported when they are first used, so that `import anypo` and `anypo list` stay instant.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Batch": "anypo.batch", "Policy": "anypo.policy", "Loss": "anypo.policy", "Signals": "anypo.policy", "Prompt": "anypo.task", "Task": "anypo.task",
    "Method": "anypo.method", "Study": "anypo.method", "Paper": "anypo.method", "Stage": "anypo.method", "Run": "anypo.run",
    "train": "anypo.api", "evaluate": "anypo.api", "compare": "anypo.comparison", "get": "anypo.catalogue", "list_methods": "anypo.catalogue:entries",
    "claim": "anypo.claims", "ablation": "anypo.claims", "Evidence": "anypo.claims", "reproduce": "anypo.claims:reproduce_slugs",
}  # fmt: skip
__all__ = sorted(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"anypo has no '{name}'; it has {', '.join(__all__)}")
    module, _, attribute = _EXPORTS[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value
