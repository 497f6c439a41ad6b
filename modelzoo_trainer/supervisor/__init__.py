"""Restarts of the command line: a supervisor, its child, and the goodput of the run.

    supervising ---- starts, signals, kills ---> child (the same command again)
      |  process      <--- shared status, memory: heartbeat, steps ------  timekeeper, watchdog
      |  outcome      <--- report, a file: exceptions, checkpoints ------  child
      |  policy: restart, or not
      `- goodput

The supervisor imports nothing of torch. What survives the child's death at any instant is in the
shared status: that needs no disk, so a full one looks like nothing worse than it is.
"""
