"""Where a golden file's slug or signature differs from the library's: which modules hold a file's quantities, and one-line adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anypo.domains.masked.decode import reveal
from anypo.methods.language import f_tis, iib_lpo
from anypo.seams.credit import gae, whiten

# Golden files that cover several rows, or a shared baseline without a row of its own: the modules to look in, in order.
MODULES: dict[str, list[str]] = {
    "bupo": ["anypo.methods.language.bupo", "anypo.domains.language.internal"],
    "dgpo": ["anypo.methods.masked.dgpo", "anypo.domains.masked.graphs", "anypo.domains.masked.cells"],
    "dr_rpo": ["anypo.methods.tabular.dr_rpo", "anypo.domains.tabular.robust_mdp"],
    "drift_maintenance": ["anypo.methods.control.drift_maintenance", "anypo.domains.control.malware"],
    "ecpo": ["anypo.methods.language.ecpo", "anypo.domains.language.certificates"],
    "gae_sac": ["anypo.methods.control.sac"],
    "hpgd": ["anypo.methods.tabular.hpgd", "anypo.domains.tabular.leader"],
    "iib_lpo": ["anypo.methods.language.iib_lpo", "anypo.domains.language.latents"],
    "model_tracking_pg": ["anypo.methods.control.model_tracking_pg", "anypo.domains.control.tracking", "anypo.domains.control.track_car"],
    "newton": ["anypo.methods.language.newton", "anypo.domains.language.toys.physics_scenes"],
    "ohp_rl": ["anypo.methods.control.ohp_rl", "anypo.domains.control.peg"],
    "orderflow": ["anypo.methods.control.orderflow", "anypo.domains.control.order_book"],
    "para_grpo": ["anypo.methods.language.para_grpo", "anypo.domains.language.toys.event_video"],
    "psn": ["anypo.methods.control.psn", "anypo.domains.control.skill_grid"],
    "regression_oracle": ["anypo.methods.tabular.regression_oracle", "anypo.domains.tabular.payments"],
    "rloo_reinforce_pp": ["anypo.methods.language.rloo", "anypo.methods.language.reinforce_pp"],
    "shared_backbone_ppo": ["anypo.methods.control.shared_backbone_ppo", "anypo.domains.control.uav_swarm"],
}

# (slug, quantity) -> a function of the case's keyword arguments.
ADAPTERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("gae_sac", "advantages"): gae,
    ("gae_sac", "normalized_advantages"): whiten,
    ("iib_lpo", "filter"): iib_lpo.kept,
    ("lightningrl", "reveal"): lambda conf, masked, threshold: reveal(conf, masked, threshold),
    ("f_tis", "weights"): lambda gen_logp, logp, C, **rest: f_tis.weights(gen_logp, logp, C),
}
