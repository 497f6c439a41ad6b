"""Restarts of the command line: a supervisor, its child, and the goodput of the run.

    supervising ---- starts, signals, kills ---> child (the same command again)
      |  process      <--- shared status, memory: heartbeat, steps ------  timekeeper, watchdog
      |  outcome      <--- report, a file: exceptions, checkpoints ------  child
      |  policy: restart, or not
      `- goodput

The supervisor does not import torch. The shared status survives the child's death at any instant
and needs no disk, so a full disk does not hide how the child ended.
"""
