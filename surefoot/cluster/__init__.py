"""Hardware as data, measured on the spot or taken from a datasheet."""

from __future__ import annotations

from surefoot.cluster.hardware import Cluster as Cluster
from surefoot.cluster.hardware import Device as Device
from surefoot.cluster.hardware import Link as Link
from surefoot.cluster.peak import Peak as Peak
from surefoot.cluster.peak import matmul_peak as matmul_peak
from surefoot.cluster.peak import memory_bandwidth as memory_bandwidth
