"""All dashboards, in the order in which one looks at them."""

from deploy.boards.fleet import FLEET
from deploy.boards.moe import MOE
from deploy.boards.overview import OVERVIEW
from deploy.boards.recovery import RECOVERY
from deploy.boards.serving import SERVING

BOARDS = (OVERVIEW, SERVING, RECOVERY, MOE, FLEET)
