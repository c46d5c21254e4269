"""Pipeline parallelism: the split into stages, schedules from files, and the runtime."""
