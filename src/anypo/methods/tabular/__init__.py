"""Methods for finite Markov decision processes, one file a paper."""
