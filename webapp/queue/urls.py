"""URLs of the queue pages; actions are POST."""

from django.urls import path

from webapp.queue import actions, views

POOL = "queue/<slug:pool_id>/"

urlpatterns = [
    path("queue/", views.queue_list, name="queue-list"),
    path("queue/limits/", actions.queue_limits, name="queue-limits"),
    path(POOL, views.queue_detail, name="queue-detail"),
    path(f"{POOL}up/", views.queue_up, name="queue-up"),
    path(f"{POOL}down/", views.queue_down, name="queue-down"),
    path(f"{POOL}priority/", views.queue_priority, name="queue-priority"),
]
