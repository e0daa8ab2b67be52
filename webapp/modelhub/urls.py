"""URLs of models and techniques."""

from django.urls import path

from webapp.jobs.evaluating import model_evaluate
from webapp.modelhub import techniques, views

urlpatterns = [
    path("models/", views.model_list, name="model-list"),
    path("models/new/", views.model_new, name="model-new"),
    path("models/<slug:model_id>/evaluate/", model_evaluate, name="model-evaluate"),
    path("models/<path:model_id>/", views.model_detail, name="model-detail"),
    path("techniques/", techniques.technique_list, name="technique-list"),
    path("techniques/<str:key>/", techniques.technique_detail, name="technique-detail"),
]
