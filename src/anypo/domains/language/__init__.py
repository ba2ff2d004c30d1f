"""Language: causal language models as policies over tokens, their sampler, tasks and rewards."""
