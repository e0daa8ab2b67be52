"""The address of limits; a plan's own tab of them is one of the plan's."""

from django.urls import path

from webapp.limits import views

urlpatterns = [path("limits/", views.limits, name="limits")]
