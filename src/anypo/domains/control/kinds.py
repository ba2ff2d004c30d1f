"""The kinds of policies that act in environments, found by what they can compute and by their names. A class is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Set
from typing import Any

PLAIN = "anypo.domains.control.policy:ControlPolicy"  # an actor beside a critic
BY_SIGNAL = {  # a signal that only one kind provides (or that others lack, before theirs) -> that kind
    "steered_noise": "anypo.domains.diffusion.steering:SteeredPolicy",
    "energy_new": "anypo.domains.diffusion.energy_flow:EnergyFlowActorCritic",
    "cost_q_new": "anypo.domains.control.costly:CostAwareActorCritic",
    "q_new": "anypo.domains.control.soft:SquashedGaussianActorCritic",
    "q_actor": "anypo.domains.control.deterministic:DeterministicActorCritic",
    "inner_value": "anypo.domains.diffusion.valued_flow:ValuedFlowActorCritic",
    "path_velocity": "anypo.domains.diffusion.noisy_flow:NoisyFlowPolicy",
    "flow_velocity": "anypo.domains.diffusion.action_flow:FlowActionPolicy",
    "mixture_logp": "anypo.methods.control.cfpi:ClosedFormPolicy",
    "feedback": "anypo.domains.control.tracking:TrackingPolicy",
    "shared_value": "anypo.methods.control.shared_backbone_ppo:SharedBackbonePolicy",
    "denoising_chain": "anypo.domains.diffusion.action_diffusion:DiffusionActionPolicy",
}


def kind_for(needs: Set[str]) -> Any:
    """The class of policies that a method with these needs learns with."""
    return _class(next((place for signal, place in BY_SIGNAL.items() if signal in needs), PLAIN))


def kind_named(name: str) -> Any | None:
    """The class of that name, None when there is none."""
    return next((_class(place) for place in (PLAIN, *BY_SIGNAL.values()) if place.endswith(f":{name}")), None)


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
