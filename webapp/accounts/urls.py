"""URLs of accounts: login, logout, passwords, sessions, secrets, team, theme."""

from django.contrib.auth.views import LogoutView
from django.urls import path

from webapp.accounts import password_views, secret_views, session_views, views
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
    path("settings/password/", password_views.password_change, name="password"),
    path("password/forgotten/", password_views.password_forgotten, name="password-forgotten"),
    path(
        "password/new/<slug:uid>/<slug:token>/", password_views.password_new, name="password-new"
    ),
    path("theme/", views.theme_choose, name="theme"),
]
