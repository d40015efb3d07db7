"""Several ranks of one engine in one process, with every interleaving decided by a seed."""
