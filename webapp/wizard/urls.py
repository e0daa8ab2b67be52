"""URLs of the wizard."""

from django.urls import path

from webapp.wizard import side_by_side, views

urlpatterns = [
    path("plans/new/", views.plan_new, name="plan-new"),
    path("plans/template/classification/", side_by_side.template_launch, name="template-launch"),
    path("plans/<str:plan_id>/edit/<slug:step>/", views.plan_step, name="plan-step"),
    path("plans/<str:plan_id>/upload/", views.plan_upload, name="plan-upload"),
    path("plans/<str:plan_id>/offers/", views.plan_offers, name="plan-offers"),
    path("plans/<str:plan_id>/verdict/", views.plan_verdict, name="plan-verdict"),
    path("plans/<str:plan_id>/suggestion/", views.plan_suggestion, name="plan-suggestion"),
]
