"""Training in a fraction of the memory: what autograd saves is kept within an error bound."""
