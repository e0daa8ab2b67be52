"""Addresses of accounts: log in, log out, theme."""

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from webapp.accounts import views

urlpatterns = [
    path("login/", LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("team/", views.team_choose, name="team-choose"),
    path("theme/", views.theme_choose, name="theme"),
]
