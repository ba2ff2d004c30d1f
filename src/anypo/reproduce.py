"""Moved to anypo.claims (a module named like the public function `anypo.reproduce` would hide it)."""

from anypo.claims import *  # noqa: F403
from anypo.claims import Claim, Evidence, ablation, claim, claims_of, reproduce, reproduce_one, reproduce_slugs, run_claim  # noqa: F401
