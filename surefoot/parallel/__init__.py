"""How work is laid out over processes: the layout as data, the processes, and one file for each kind of parallelism."""

from surefoot.parallel.data import GradientSync as GradientSync
from surefoot.parallel.data import shard_model as shard_model
from surefoot.parallel.layout import Layout as Layout
from surefoot.parallel.process import Processes as Processes
from surefoot.parallel.process import launch as launch
