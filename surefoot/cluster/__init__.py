"""Hardware as data, measured on the spot."""

from __future__ import annotations

from surefoot.cluster.peak import Peak as Peak
from surefoot.cluster.peak import matmul_peak as matmul_peak
from surefoot.cluster.peak import memory_bandwidth as memory_bandwidth
