"""Restarts of the command line: a supervisor, its child, and the ledger of where the time went.

    supervising ---- starts, signals, kills ---> child (the same command again)
      |  process      <--- page, shared memory: beats, steps, seconds ---  timekeeper, watchdog
      |  outcome      <--- status, a file: exceptions, checkpoints ------  child
      |  policy: again, or not
      `- ledger

The supervisor imports nothing of torch. What survives the child's death at any instant is in the
page: that needs no disk, so a full one looks like nothing worse than it is.
"""
