"""URLs of the history."""

from django.urls import path

from webapp.audit import views

urlpatterns = [
    path("audit/", views.audit_list, name="audit"),
    path("audit/export/", views.audit_export, name="audit-export"),
]
