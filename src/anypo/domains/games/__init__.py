"""Games of two players: with hidden cards and solved exactly, one-shot dilemmas, differentiable games, programs that read programs, and foraging."""
