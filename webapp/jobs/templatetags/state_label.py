"""Template tag for a job's status chip, with its host's silence."""

from django import template
from django.utils.safestring import SafeString

from webapp.core.display import fragment
from webapp.core.templatetags.status import status
from webapp.jobs.models import Job
from webapp.jobs.progress import state_label_of

register = template.Library()


@register.simple_tag
def state_label(job: Job) -> SafeString:
    """Render a job's status chip and, while its host is silent, for how long."""
    label = state_label_of(job)
    chip = status(label.state, label.word)
    return fragment("jobs/_standing.html", chip=chip, note=label.note) if label.note else chip
