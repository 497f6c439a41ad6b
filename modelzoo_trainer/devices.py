"""All that `backends` offers; but for this module only what needs no torch is imported from it."""

from modelzoo_trainer.sibling import require_sibling

require_sibling("backends")
from backends import *  # noqa: E402, F403  # a shadowing module is refused first
