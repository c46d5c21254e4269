"""Helpers for every folder: errors, logging, signals, devices, storage, and the clock of
phases.
"""
