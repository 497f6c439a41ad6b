"""Evaluation of language models on the tasks of EleutherAI's lm-evaluation-harness (`lm_eval`)."""
