"""URLs of plans; the wizard's are in ``webapp/wizard/urls.py``."""

from django.urls import path

from webapp.plans import views

urlpatterns = [
    path("plans/", views.plan_list, name="plan-list"),
    path("plans/<str:plan_id>/", views.plan_detail, name="plan-detail"),
    path("plans/<str:plan_id>/launch/", views.plan_launch_view, name="plan-launch"),
    path("plans/<str:plan_id>/clone/", views.plan_clone, name="plan-clone"),
    path("plans/<str:plan_id>/delete/", views.plan_delete, name="plan-delete"),
    path("plans/<str:plan_id>/compute/", views.plan_compute_view, name="plan-compute"),
    path("plans/<str:plan_id>/exports/<slug:key>/", views.plan_export, name="plan-export"),
    path("plans/<str:plan_id>/<slug:tab>/", views.plan_detail, name="plan-tab"),
]
