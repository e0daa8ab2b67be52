"""URLs of training data."""

from django.urls import path

from webapp.datasets import views

urlpatterns = [
    path("data/", views.dataset_list, name="dataset-list"),
    path("data/upload/", views.dataset_upload, name="dataset-upload"),
    path("data/<slug:dataset_id>/delete/", views.dataset_remove, name="dataset-remove"),
]
