"""All names of `backends`; other modules import from it only what needs no torch."""

from modelzoo_trainer.base.sibling import require_sibling

require_sibling("backends")
from backends import *  # noqa: E402, F403  # a shadowing module is refused above
