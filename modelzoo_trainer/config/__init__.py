"""YAML files to checked plans to trainers; `load_plans` is the way in, `cli.py` its user.

loader -> overrides -> build (sections, components, arguments, names) -> Trainer
"""
