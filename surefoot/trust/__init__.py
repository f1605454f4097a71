"""The instrument: whether two computations of the same thing are identical, equivalent, lossy or wrong, and where they part."""

from surefoot.trust.compare import compare as compare
from surefoot.trust.evidence import Evidence as Evidence
from surefoot.trust.evidence import Finding as Finding
from surefoot.trust.evidence import Row as Row
from surefoot.trust.evidence import Verdict as Verdict
from surefoot.trust.trace import PHASES as PHASES
from surefoot.trust.trace import Entry as Entry
from surefoot.trust.trace import Owner as Owner
from surefoot.trust.trace import Phase as Phase
from surefoot.trust.trace import Trace as Trace
from surefoot.trust.trace import TraceError as TraceError
from surefoot.trust.trace import assemble as assemble
