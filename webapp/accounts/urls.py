"""Addresses of accounts: log in, log out, theme."""

from django.contrib.auth.views import LogoutView
from django.urls import path

from webapp.accounts import secret_views, session_views, views
from webapp.accounts.login import GuardedLogin

urlpatterns = [
    path("login/", GuardedLogin.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("team/", views.team_choose, name="team-choose"),
    path("settings/secrets/", secret_views.secret_list, name="secrets"),
    path("settings/secrets/save/", secret_views.secret_save, name="secret-save"),
    path(
        "settings/secrets/<slug:secret_id>/delete/",
        secret_views.secret_remove,
        name="secret-remove",
    ),
    path("settings/sessions/", session_views.session_list, name="sessions"),
    path("settings/sessions/end/", session_views.session_end, name="session-end"),
    path("theme/", views.theme_choose, name="theme"),
]
