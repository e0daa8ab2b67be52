"""URL of the limits page; the limits tab of a plan is in ``webapp.plans``."""

from django.urls import path

from webapp.limits import views

urlpatterns = [path("limits/", views.limits, name="limits")]
