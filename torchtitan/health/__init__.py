"""Health of a run: the hang watch and its diagnosis, loss spikes, replicas that differ,
slow ranks.
"""
