"""Floor 6: pages. What a person looks at in a browser, made from the event log alone."""

from __future__ import annotations

from surefoot.web.report import Sample as Sample
from surefoot.web.report import write_report as write_report
