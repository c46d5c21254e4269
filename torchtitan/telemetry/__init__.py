"""What a run says about itself: metrics, time, hangs, spikes, slow ranks, profiles."""
