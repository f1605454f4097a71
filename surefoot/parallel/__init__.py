"""How work is laid out over processes: the layout as data, the processes, and one file for each kind of parallelism."""

from surefoot.parallel.compose import ParallelModel as ParallelModel
from surefoot.parallel.compose import parallelise as parallelise
from surefoot.parallel.data import GradientSync as GradientSync
from surefoot.parallel.data import local as local
from surefoot.parallel.layout import Layout as Layout
from surefoot.parallel.mesh import Mesh as Mesh
from surefoot.parallel.mesh import make_mesh as make_mesh
from surefoot.parallel.placement import Coordinates as Coordinates
from surefoot.parallel.placement import Part as Part
from surefoot.parallel.placement import Placement as Placement
from surefoot.parallel.process import Processes as Processes
from surefoot.parallel.process import launch as launch
