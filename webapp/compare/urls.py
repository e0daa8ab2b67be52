"""URL of the comparison."""

from django.urls import path

from webapp.compare import views

urlpatterns = [path("compare/", views.compare, name="compare")]
