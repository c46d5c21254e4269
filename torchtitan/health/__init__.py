"""What keeps a run healthy: the hang watch and its diagnosis, loss spikes, replicas that differ,
slow ranks.
"""
